"""Generation: prompts of unequal lengths, tokens that are drawn, streams and stop tokens."""

from collections import deque
from copy import copy
from pathlib import Path

import pytest
import torch

from ssd.modules import Mamba2LM
from ssd.modules.sampling import Sampling
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.modules.test_language_model import make_model, over_settings, tokens
from tests.refused import over_refusals

WAYS = {"greedy": {}, "drawn": {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, "stopped": {"eos_token_id": [3, 7, 11, 20]}}
LENGTHS = (23, 1, 2, 9)


def generate(model: Mamba2LM, *given, seed: int = 0, **settings) -> torch.Tensor:
    if settings.get("temperature"):
        settings["generator"] = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    return model.generate(*given, **settings)


@over_settings
@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_row_goes_on_as_it_would_alone(settings, side, device):
    model, ids = make_model(device, **settings), tokens(device, len(LENGTHS))
    alone = torch.cat([model.generate(ids[n : n + 1, :length], 6)[:, length:] for n, length in enumerate(LENGTHS)])
    padded, mask = torch.full_like(ids, -1), torch.zeros_like(ids)
    for n, length in enumerate(LENGTHS):
        columns = slice(23 - length, None) if side == "left" else slice(length)
        padded[n, columns], mask[n, columns] = ids[n, :length], 1
    got = model.generate(padded, 6, attention_mask=mask)
    assert torch.equal(got[:, :23], padded) and torch.equal(got[:, 23:], alone)
    few = model.generate(padded[2:], 6, attention_mask=mask[2:].bool())  # some columns are padding in every row
    assert torch.equal(few[:, 23:], alone[2:])


def test_a_cache_is_any_sequence(device):
    model, ids = make_model(device), tokens(device)
    assert torch.equal(model.generate(ids, 3, deque(model.new_cache(2))), model.generate(ids, 3))


def test_states_in_half_precision(device):
    """They are rounded at each token, and go on in pieces and steps."""
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2, state_dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(ids)
        got = [model(ids[:, :9], cache=cache), model(ids[:, 9:12], cache=cache)]
        got = torch.cat([*got, *(model.step(token, cache)[:, None] for token in ids[:, 12:].unbind(1))], 1)
    assert {layer.ssm_state.dtype for layer in cache} == {torch.bfloat16}
    assert 0 < (got - expected).square().mean() < 1e-4 * expected.square().mean()


def test_a_stream_is_what_is_generated(device):
    model, ids = make_model(device), tokens(device)
    cache, expected = model.new_cache(2), model.generate(ids, 6)[:, 23:]
    stream = model.stream(ids, 6, cache)
    first = torch.stack([next(stream) for _ in range(3)], 1)
    assert torch.equal(first, expected[:, :3]) and not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert torch.equal(model.generate(first[:, -1:], 3, cache)[:, 1:], expected[:, 3:]), "who stops can go on later"


def test_each_of_several_tokens_ends_a_sequence(device):
    model, ids = make_model(device), tokens(device)
    free = model.generate(ids, 8)[:, 23:]
    ends = [int(free[1, 4]), int(free[0, 2])]
    ended = torch.isin(free, torch.tensor(ends, device=device)).cumsum(1)
    got = model.generate(ids, 8, eos_token_id=ends)[:, 23:]
    after = (ended - torch.isin(free, torch.tensor(ends, device=device)).long()) > 0
    assert torch.equal(got, free.masked_fill(after, ends[0])[:, : got.shape[1]])
    assert got.shape[1] == int((ended == 0).sum(1).max()) + 1 < 8


def test_tokens_are_drawn_by_their_probabilities(device):
    """40,000 at once: each share is within five standard deviations."""
    logits = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.5, -30.0], device=device)
    for setting, kept in (({}, range(6)), ({"top_k": 2}, (0, 3)), ({"top_p": 0.5}, (0, 3)), ({"top_p": 0.3}, (0,)),
                          ({"top_k": 99, "top_p": 1.0}, range(6)), ({"top_k": 4, "top_p": 0.9}, (0, 2, 3, 4))):
        sampling = Sampling(1.5, **setting, generator=torch.Generator(device).manual_seed(3))
        found = sampling.choose(logits.expand(40_000, -1)).bincount(minlength=6) / 40_000
        expected = torch.zeros_like(logits)
        expected[[*kept]] = (logits[[*kept]] / 1.5).softmax(0)
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 40_000).sqrt()).all(), setting


def test_a_seed_gives_the_same_tokens_again(device):
    model, ids = make_model(device), tokens(device)
    one, again, other = (generate(model, ids, 8, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    greedy = model.generate(ids, 8)
    for setting in ({"temperature": 1e-30}, {"temperature": 1e-320}, {"temperature": 2.0, "top_k": 1},
                    {"temperature": 2.0, "top_p": 1e-6}):
        assert torch.equal(model.generate(ids, 8, **setting), greedy)


@over_refusals(Path(__file__).with_name("refused.txt"), "stream")
def test_bad_arguments_are_refused_before_a_token(refusal):
    def stream(attention_mask=None, **given):
        mask = torch.tensor(attention_mask) if isinstance(attention_mask, tuple) else attention_mask
        return make_model().stream(attention_mask=mask, **given)

    refusal.check(stream, {"input_ids": torch.ones(2, 3, dtype=torch.int64), "max_new_tokens": 3})


def test_one_cache_for_several_layers_is_refused():
    model = make_model()
    cache = model.new_cache(1)
    with pytest.raises(ValueError, match="cache: got one Mamba2Cache for several layers, expected one for each"):
        model(torch.ones(1, 3, dtype=torch.int64), cache=[copy(cache[0]) for _ in cache])


def test_padding_after_tokens_is_refused():
    model, ids = make_model(), tokens("cpu", seqlen=3)
    cache = model.new_cache(2)
    model.generate(ids, 2, cache)
    with pytest.raises(ValueError, match="attention_mask: got padding with a cache that has had tokens"):
        model.generate(ids, 2, cache, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))


@pytest.mark.gpu
def test_on_a_gpu_what_cannot_be_had_is_refused_and_hooks_are_called():
    model, ids, called = make_model("cuda"), tokens("cuda"), []
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match=r"graph: got True, .*: autocast"):
        model.generate(ids, 12, graph=True)
    with pytest.raises(ValueError, match="generator: got one on cpu, expected one on cuda"):
        model.generate(ids, 12, temperature=1.0, generator=torch.Generator())
    expected = model.generate(ids, 12, graph=True)
    model.backbone.norm_f.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(model.generate(ids, 12), expected) and len(called) == 12
