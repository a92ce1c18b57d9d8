"""Generation in CUDA graphs: what is captured, when it is replayed, and what is met that changed since."""

import copy
import gc
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from ssd.modules import Mamba2LM, captured, decoding
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.modules.test_generation import WAYS, generate
from tests.modules.test_language_model import make_model, tokens


@pytest.fixture
def captures(monkeypatch, device) -> list:
    """What was captured. On a CPU the stand-in for a graph reads and writes the same tensors again and again."""
    found, warm, capture, warm_up = [], [], captured.capture, captured.warm_up

    def begin(run, on):
        warm.append(run.args[1])
        return warm_up(run, on) if device == "cuda" else run()

    def record(run, on, pool):
        *part, given = run.args
        if not part or not part[0].start:  # of the others the same is true
            assert any(given is before for before in warm), "kernels are compiled before they are captured"
            found.append(run)
        if device == "cuda":
            return capture(run, on, pool)
        with torch.inference_mode(False):  # a replay is of no mode
            logits, stream = torch.full((len(found[-1].args[-1][0]), 64), torch.nan), []
        ends = not part or part[0].stop == len(run.keywords["cache"])
        return (lambda: logits.copy_(run()), logits) if ends else (lambda: stream.__setitem__(slice(None), run()), stream)

    monkeypatch.setattr(captured, "capture", record)
    monkeypatch.setattr(captured, "warm_up", begin)
    if device == "cpu":
        monkeypatch.setattr(decoding, "explain_moment", lambda on: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_captured_step_gives_the_same_tokens(way, captures, device):
    """Replayed for one prompt after another, a padded one among them."""
    model, mask = make_model(device), torch.ones(2, 23, dtype=torch.bool, device=device)
    mask[1, :20] = False
    cache = model.new_cache(2)
    for seed, more in enumerate(({}, {"attention_mask": mask}, {})):
        ids, more = tokens(device).roll(seed, 1), WAYS[way] | more
        expected = generate(model, ids, 12, seed=seed, graph=False, **more)
        assert torch.equal(generate(model, ids, 12, seed=seed, graph=True, **more), expected)
        cache.reset()
        assert torch.equal(generate(model, ids, 12, cache, seed=seed, **more), expected)
    assert len(captures) == 5, "one for each call without a cache, one that the cache kept, and a prompt's that came twice"


def test_a_graph_is_of_its_weights_and_states(captures, device):
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    model.generate(ids, 8, cache)
    assert not captures, "seven steps are not worth it"

    def check(count):
        cache.reset()
        assert torch.equal(model.generate(ids, 12, cache), model.generate(ids, 12, graph=False)) and len(captures) == count

    check(2)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    check(2)
    model.load_state_dict({name: 0.9 * t for name, t in model.state_dict().items()}, assign=True)
    check(3)
    check(4)
    for copied in (copy.deepcopy(cache), copy.copy(cache), cache.copy()):
        assert copied.captured is None and torch.equal(copied[0].ssm_state, cache[0].ssm_state)
        assert type(copied) is type(cache) and copied[0].ssm_state.data_ptr() != cache[0].ssm_state.data_ptr()


def test_prompts_that_come_again(captures, device, monkeypatch):
    """In pieces, of which each goes on with the states of the one before, and of more shapes than graphs are kept of."""
    model, ids = make_model(device), tokens(device)
    cache, expected = model.new_cache(2), model.generate(ids, 4, graph=False)
    for count in (0, 2, 2, 2):
        cache.reset()
        model.generate(ids[:, :9], 1, cache)
        assert torch.equal(model.generate(ids[:, 9:], 4, cache), expected[:, 9:]) and len(captures) == count
    monkeypatch.setattr(captured, "_MOST_PROMPTS", 4)
    for length in (2, 3, 4):
        model.generate(ids[:, :length], 1, cache)
    assert [shape[1:] for shape in cache.captured.prompts] == [(2, 14), (2, 2), (2, 3), (2, 4)]
    for module in (decoding, captured):
        monkeypatch.setattr(module, "MOST_CHANNELS", ids[:, 9:].numel() * model.config.d_model - 1)
    model.generate(ids[:, :9], 1, cache)
    model.generate(ids[:, 9:], 1, cache)
    assert [shape[2] for shape in cache.captured.prompts] == [2, 3, 4, 9], "others are read launch by launch"
    model.generate(ids[:, :13], 1, cache)
    assert [shape[2] for shape in cache.captured.prompts] == [4, 9, 13], "of no more than 27 tokens in all"


def test_padding_makes_prompts_of_few_shapes(captures, device):
    """Of powers of two, or as wide as they came."""
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    for length in (23, 7, 23, 1, 15):
        mask = torch.zeros_like(ids)
        mask[0, :length], mask[1, :5] = 1, 1
        cache.reset()
        got = model.generate(ids, 4, cache, attention_mask=mask)[:, 23:]
        assert torch.equal(got, model.generate(ids, 4, attention_mask=mask, graph=False)[:, 23:])
    assert len(captures) == 2 and [*cache.captured.prompts] == [(2, 2, 23), (2, 2, 8), (2, 2, 16)]


def test_prompts_of_all_lengths_share_graphs(captures, device, monkeypatch):
    """Where the cache says so, and has had no token; a second prompt goes on with the states of the first."""
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2, pad_prompts=True)
    monkeypatch.setattr(decoding, "_MOST_PADDED", 15 * 2 * model.config.d_model)
    for length in (9, 15, 11, 16, 13, 1):
        cache.reset()
        assert torch.equal(model.generate(ids[:, :length], 4, cache), model.generate(ids[:, :length], 4, graph=False))
    before = model.generate(ids[:, :1], 4, graph=False)[:, :4]  # a cache has all but the last
    expected = model.generate(torch.cat([before, ids[:, :3]], 1), 2, graph=False)
    assert torch.equal(model.generate(ids[:, :3], 2, cache), expected[:, 4:])
    assert len(captures) == 1 and [*cache.captured.prompts] == [(1, 2, 16), (2, 2, 16), (1, 2, 1), (1, 2, 3)]
    for copied in (cache.copy(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.pad_prompts and copied.captured is None
    with pytest.raises(TypeError, match="pad_prompts: got 1, expected True or False"):
        model.new_cache(2, pad_prompts=1)


def test_when_a_cache_is_new(device):
    """Made or reset, until a token, or anything else, is written to it or one of its layers' caches is another."""
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2, pad_prompts=True)
    other = cache[1].ssm_state.clone()
    assert cache.is_new() and not copy.deepcopy(cache).is_new()
    for use in (lambda: model(ids, cache=cache), lambda: model.step(ids[:, 0], cache), lambda: cache[1].ssm_state.zero_(),
                lambda: cache.__setitem__(1, model.backbone.layers[1].mixer.new_cache(2)),
                lambda: setattr(cache[1].ssm_state, "data", other), cache.mark_used):
        cache.reset()
        assert cache.is_new()
        with torch.inference_mode():
            use()
        assert not cache.is_new()
    with torch.inference_mode():
        copied = cache.copy()
        copied.reset()
    assert not copied.is_new(), "tensors of that mode have no versions"


def test_what_is_not_padded(captures, device):
    """Prompts with a cache that has had tokens, whatever its states say; and of a model that somebody looks into."""
    model, ids, widths = make_model(device), tokens(device), []
    cache = model.new_cache(2, pad_prompts=True)
    cache.mark_used()
    for width in (3, 4):
        assert model.generate(ids[:, :width], 1, cache).shape == (2, width + 1)
    assert [*cache.captured.prompts] == [(1, 2, 3), (1, 2, 4)]
    cache.reset()
    model.backbone.embedding.register_forward_hook(lambda *of: widths.append(of[1][0].shape[1]))
    model.generate(ids[:, :5], 1, cache)
    model.generate(ids[:, :5], 1, model.new_cache(2, pad_prompts=True), attention_mask=torch.ones_like(ids[:, :5]))
    assert widths == [5, 5]


@pytest.mark.parametrize("change", [
    lambda model: setattr(model.backbone.norm_f, "forward", torch.neg),
    lambda model: model.backbone.norm_f.register_forward_hook(lambda *of: -of[-1]),
    lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.data.flip(0))),
    lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.view(32, 64).mT),
    lambda model: model.backbone.layers[-1].mixer.register_forward_hook(lambda *of: -of[-1]),
    lambda model: setattr(model.backbone.layers[-1].norm, "weight", torch.nn.Parameter(torch.arange(32.0).to(
        model.lm_head.weight.device)))],
    ids=["forward replaced", "hook", "other weights", "other strides", "hook of a layer", "other weights of a layer"])
def test_what_changes_a_model_before_its_stream_begins_is_met(change, captures, device):
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    for _ in range(2):
        cache.reset()
        model.generate(ids, 12, cache)
    cache.reset()
    stream = model.stream(ids, 12, cache)
    change(model)
    got = torch.stack([*stream], 1)
    assert torch.equal(got, model.generate(ids, 12, graph=False)[:, 23:])
    for _ in range(3):
        cache.reset()
        assert torch.equal(model.generate(ids, 12, cache)[:, 23:], got)


@pytest.mark.parametrize("more", ({}, {"pad_prompts": True}), ids=("", "padded"))
@pytest.mark.parametrize("length", (23, 11), ids=("replayed", "new"))
def test_a_change_of_the_last_layer_is_met(length, more, captures, device):
    """In a prompt that is replayed and in one of a new shape, and in the steps after it: of weights, and of hooks."""
    model, ids, seen = make_model(device), tokens(device), []
    cache = model.new_cache(2, **more)

    def check():
        cache.reset()
        assert torch.equal(model.generate(ids[:, :length], 12, cache), model.generate(ids[:, :length], 12, graph=False))

    for _ in range(3):
        cache.reset()
        model.generate(ids, 12, cache)
    with torch.no_grad():
        model.backbone.layers[-1].norm.weight = torch.nn.Parameter(model.backbone.layers[-1].norm.weight.flip(0) + 1)
    for _ in range(3):
        check()
    model.backbone.layers[-1].mixer.register_forward_hook(lambda *of: seen.append(of[1][0].shape[1]))
    check()
    assert seen == 2 * [length, *11 * [1]], "in each prompt and each step"


@pytest.mark.parametrize("owner", (lambda model: model, lambda model: model.backbone, type), ids=("model", "backbone", "class"))
def test_a_read_of_ones_own_is_called(owner, captures, device):
    model, ids = make_model(device), tokens(device)
    model.__class__ = type("Own", (Mamba2LM,), {})
    replaced, kept = owner(model), model.new_cache(2)
    read = replaced.read
    replaced.read = lambda *given, **more: read(*given, **more).flip(-1)
    for _ in range(3):
        kept.reset()
        assert torch.equal(model.generate(ids, 3, kept), model.generate(ids, 3, graph=False))
    assert len(kept.captured.parts) == 1


def test_parts_have_all_layers():
    assert [len(part) for part in captured.split_layers(64)] == [1, 2, 4, 8, 16, 33]
    for layers in range(1, 100):
        assert [n for part in captured.split_layers(layers) for n in part] == [*range(layers)]


def test_a_graph_is_of_one_model(captures, device):
    model, ids = make_model(device), tokens(device)
    cache, other = model.new_cache(2), copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    for of, count in ((model, 1), (model, 2), (other, 3), (model, 4)):
        cache.reset()
        assert torch.equal(of.generate(ids, 12, cache), of.generate(ids, 12, graph=False)) and len(captures) == count
    other.load_state_dict(model.state_dict(), assign=True)
    assert not cache.captured.fits(other, cache), "though its weights are the same tensors"


def test_a_cache_that_was_taken_before_is_refused_at_once(captures, device):
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    model.generate(ids, 12, cache)
    with pytest.raises(ValueError, match="cache: got one of batch 2, expected batch 1"):
        model.stream(ids[:1], 1, cache)
    cache[1].ssm_state.data = cache[1].ssm_state[:, :, :, :8]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cache\.ssm_state: got shape"):
            model.stream(ids, 1, cache)


def test_a_cache_does_not_hold_the_model(device, monkeypatch):
    monkeypatch.setattr(decoding, "explain_moment", lambda *_: None)
    monkeypatch.setattr(captured, "warm_up", lambda run, on: run())
    model, ids = make_model(device), tokens(device)
    cache, gone = model.new_cache(2), weakref.ref(model)
    model.generate(ids, 1, cache)
    del model
    gc.collect()
    assert cache.captured.prompts and gone() is None


def test_a_first_call_that_fails_is_made_again(captures, device, monkeypatch):
    model, ids = make_model(device), tokens(device)
    cache, expected = model.new_cache(2), model.generate(ids, 2, graph=False)
    with monkeypatch.context() as during, pytest.raises(ZeroDivisionError):
        during.setattr(Mamba2LM, "read_part", lambda *_, **__: 1 / 0)
        model.generate(ids, 2, cache)
    for fails in (False, True, False, False, False):  # the second would have been captured
        cache.reset()
        with monkeypatch.context() as during, pytest.raises(RuntimeError) if fails else nullcontext():
            if fails:
                during.setattr(captured, "capture", lambda *_: 1 / 0)
            assert torch.equal(model.generate(ids, 2, cache), expected)
    assert len(captures) == 1


def test_threads_capture_one_after_the_other(monkeypatch):
    """What one launches in the stream that captures would be in the other's graph."""
    inside, most = 0, 0

    def run():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return MagicMock()

    streams = {"stream": lambda _: nullcontext(), "current_stream": lambda _: MagicMock()}
    monkeypatch.setattr(captured, "get_side_stream", lambda _: MagicMock())
    with patch.multiple(torch.cuda, **streams), ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda n: captured.warm_up(run, torch.device("cuda", n)), range(8))]
    assert most == 1


def test_what_no_graph_can_be_of_is_said_by_name(monkeypatch):
    model, cuda = make_model(), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert captured.explain_moment(cuda) is captured.explain_model(model, torch.device("cpu")) is None
    assert "layers are on cpu too" in captured.explain_model(model, cuda)
    hook = model.backbone.norm_f.register_forward_hook(lambda *_: None)
    assert "forward hooks" in captured.explain_model(model, torch.device("cpu"))
    hook.remove()
    for place, name, reason in ((torch.cuda, "is_current_stream_capturing", "another graph"), (
            captured, "value_checks", "SSD_CHECK=1"), (torch, "is_autocast_enabled", "autocast")):
        monkeypatch.setattr(place, name, SimpleNamespace(ENABLED=True) if name == "value_checks" else lambda *_: True)
        assert reason in captured.explain_moment(cuda)


def test_a_graph_outlasts_the_mode_that_it_was_captured_in(captures, device):
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    with torch.inference_mode():
        expected = model.generate(ids, 12, cache)
    for count in (2, 2):  # the prompt comes again
        cache.reset()
        assert torch.equal(model.generate(ids, 12, cache), expected) and len(captures) == count


def test_a_capture_that_fails_names_the_way_out(captures, monkeypatch, device):
    monkeypatch.setattr(captured, "capture", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph; with graph=False it runs"):
        make_model(device).generate(tokens(device), 12)
