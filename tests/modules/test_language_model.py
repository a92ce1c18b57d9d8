"""The language model: its names, its logits, and generation whole, in pieces, step by step and packed."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ssd.modules import Mamba2, Mamba2LM, Mamba2LMConfig
from ssd.modules.captured import Mamba2LMCache
from tests.in_torch import in_torch  # noqa: F401  a fixture

LAYER = {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16}
SIZES = {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": LAYER}
SETTINGS = {
    "as it comes": {},
    "LayerNorm, a head of its own": {"rms_norm": False, "tie_embeddings": False, "residual_in_fp32": False},
    "groups, limits, biases": {"ssm_cfg": LAYER | {"ngroups": 2, "dt_limit": [0.01, 0.05], "bias": True, "d_ssm": 32}},
}
over_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def make_model(device: str = "cpu", **settings) -> Mamba2LM:
    """Weights large enough for the likeliest token to stand out."""
    torch.manual_seed(0)
    model = Mamba2LM(Mamba2LMConfig(**(SIZES | settings)))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(device)


def tokens(device: str, batch: int = 2, seqlen: int = 23) -> torch.Tensor:
    return torch.randint(61, (batch, seqlen), generator=torch.Generator().manual_seed(1)).to(device)


def follow(model: Mamba2LM, ids: torch.Tensor, count: int) -> torch.Tensor:
    """What `generate` gives, from the logits of all tokens so far each time."""
    for _ in range(count):
        best = model(ids)[:, -1, : model.config.vocab_size].argmax(-1)
        ids = torch.cat([ids, best[:, None]], 1)
    return ids


def test_parameters_are_called_as_upstreams():
    mixer = ("dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight")
    layers = {f"backbone.layers.{n}.{name}" for n in (0, 1) for name in ("norm.weight", *(f"mixer.{name}" for name in mixer))}
    model = make_model()
    assert model.state_dict().keys() == layers | {"backbone.embedding.weight", "backbone.norm_f.weight", "lm_head.weight"}
    assert model.lm_head.weight is model.backbone.embedding.weight and model.lm_head.weight.shape == (64, 32)
    more = {"backbone.norm_f.bias", *(f"backbone.layers.{n}.norm.bias" for n in (0, 1))}
    untied = make_model(rms_norm=False, tie_embeddings=False, pad_vocab_size_multiple=1)
    assert untied.state_dict().keys() == model.state_dict().keys() | more
    assert untied.lm_head.weight is not untied.backbone.embedding.weight and untied.lm_head.weight.shape == (61, 32)


@over_settings
def test_steps_are_the_whole(settings, device):
    """Greedy generation gives the tokens that the logits of all tokens so far give."""
    model, ids = make_model(device, **settings), tokens(device)
    cache = model.new_cache(2)
    with torch.no_grad():
        expected = follow(model, ids, 6)
        steps = torch.stack([model.step(token, cache) for token in ids.unbind(1)], 1)
        assert_close(steps, model(ids), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(ids, 6), expected)
    assert torch.equal(model.generate(ids.int(), 6), expected.int())


@over_settings
@pytest.mark.parametrize("pieces", ([1, 12, 10], [22, 1]), ids=str)
def test_a_prompt_in_pieces_gives_the_tokens_of_the_whole(settings, pieces, device):
    model, ids = make_model(device, **settings), tokens(device)
    *first, last = ids.split(pieces, 1)
    cache = model.new_cache(len(ids))
    with torch.no_grad():
        logits = torch.cat([model(piece, cache=cache) for piece in first], 1)
        assert_close(logits, model(ids)[:, : -pieces[-1]], rtol=1e-4, atol=1e-5)
    expected = model.generate(ids, 6)
    got = model.generate(last, 3, cache=cache)
    assert torch.equal(got, expected[:, -pieces[-1] - 6 : -3])
    assert torch.equal(model.generate(got[:, -1:], 3, cache=cache), expected[:, -4:])  # the cache has all but the last


@over_settings
def test_the_last_layer_of_a_prompt_is_finished_for_its_last_token(settings, device):
    """Unless somebody looks at what the layer computes."""
    model, ids = make_model(device, **settings), tokens(device)
    last, seen = model.backbone.layers[-1].mixer, []
    with torch.no_grad():
        expected, cache = model(ids)[:, -1], model.new_cache(2)
        assert_close(model.read(ids, cache=cache), expected, rtol=1e-4, atol=1e-5)
        hook = last.register_forward_hook(lambda *given: seen.append(given[2].shape))
        assert_close(model.read(ids, cache=model.new_cache(2)), expected, rtol=1e-4, atol=1e-5)
        hook.remove()
        model.read(ids, cache=model.new_cache(2))
        follow_up = model.step(ids[:, 0], cache), model(torch.cat([ids, ids[:, :1]], 1))[:, -1]
    assert seen == [(*ids.shape, model.config.d_model)]
    assert_close(*follow_up, rtol=1e-4, atol=1e-5)


class Added(torch.nn.Linear):
    """Adds to what the layer computes, as an adapter does."""

    def forward(self, x):
        return super().forward(x) + 1


class Opaque(torch.Tensor):
    """A weight that nobody may take apart."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            raise NotImplementedError
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if function is torch.nn.functional.linear else result


@pytest.mark.parametrize("change", [
    lambda mixer: setattr(mixer.out_proj, "__class__", Added),
    lambda mixer: setattr(mixer.norm, "norm_before_gate", True),
    lambda mixer: setattr(mixer, "norm_before_gate", True),
    lambda mixer: setattr(mixer.in_proj, "weight", torch.nn.Parameter(mixer.in_proj.weight.data.as_subclass(Opaque)))],
    ids=["adapter", "norm", "block", "weight"])
def test_prompts_of_layers_of_other_kinds(change):
    """A prompt is what `forward` makes of it, whatever became of a layer."""
    model, ids = make_model(), tokens("cpu")
    change(model.backbone.layers[-1].mixer)
    with torch.no_grad():
        assert_close(model.read(ids, cache=model.new_cache(2)), model(ids)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_modules_are_looked_into():
    model, ids = make_model(), tokens("cpu")
    expected = model.generate(ids, 2)
    size = model.backbone.embedding.num_embeddings
    model.backbone.embedding = torch.jit.trace(model.backbone.embedding, ids)
    model.backbone.embedding.num_embeddings = size
    assert torch.equal(model.generate(ids, 2), expected)


@pytest.mark.parametrize("variant", ["baseline", "fused", "persistent"])
def test_generation_by_kernels(variant, device, monkeypatch):
    """Of every kind: of a block's functions and of the SSD."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", device == "cpu")
    model, ids = make_model(device, n_layer=1), tokens(device)
    with torch.no_grad():
        expected = follow(model, ids, 2)
    model.backbone.layers[0].mixer.variant = variant
    cache = model.new_cache(2)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
    assert torch.equal(model.generate(ids, 2), expected)
    assert torch.equal(model.generate(ids[:, 9:], 2, cache=cache), expected[:, 9:])


@over_settings
def test_packed_documents_are_apart(settings, device):
    model, ids = make_model(device, **settings), tokens(device, 1)
    seq_idx = torch.tensor([[0] * 10 + [1] * 13], dtype=torch.int32, device=device)
    apart = torch.cat([model(part) for part in ids.split([10, 13], 1)], 1)
    assert_close(model(ids, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(ids), apart, atol=1e-2)


def test_half_precision(device):
    """Weights in it; the residual stream in fp32 where the config says so."""
    model, ids = make_model(device), tokens(device)
    expected, cache = model(ids), model.bfloat16().new_cache(2)
    seen = []
    model.backbone.layers[1].mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.no_grad():
        logits = model(ids, cache=cache)
        assert logits.dtype == model.step(ids[:, 0], cache).dtype == torch.bfloat16 == seen[0]
        assert (logits - expected).square().mean() < 1e-2 * expected.square().mean()
    assert model.generate(ids, 3).shape == (2, 26)


def test_padding_of_the_vocabulary_is_never_generated(device):
    model, ids = make_model(device, rms_norm=False, tie_embeddings=False), tokens(device)
    model.lm_head.weight.data[61:] = 100 * model.lm_head.weight.data[:3]
    logits = model(ids)
    assert logits.shape == (2, 23, 64) and (logits.argmax(-1) >= 61).any()
    assert (model.generate(ids, 6) < 61).all()


def test_sequences_end(device):
    """One that has ended is filled up, until all have."""
    model, ids = make_model(device), tokens(device)
    free = model.generate(ids, 8)[:, 23:]
    end = free[0, 2]
    ended = (free == end).cumsum(1) > 0
    got = model.generate(ids, 8, eos_token_id=int(end))[:, 23:]
    assert torch.equal(got, free.masked_fill(ended, end)[:, : got.shape[1]]) and not ended.all(0)[: got.shape[1] - 1].any()
    alone = model.generate(ids[:1], 8, eos_token_id=int(end))[:, 23:]
    assert torch.equal(alone, free[:1, : int((~ended[0]).sum()) + 1])


@pytest.mark.parametrize(("ids", "error", "message"), [
    ([[1, 2]], TypeError, "input_ids: got list, expected a tensor"),
    (torch.ones(1, 2), TypeError, "input_ids: got torch.float32, expected torch.int32 or torch.int64"),
    (torch.ones(2, dtype=torch.int64), ValueError, r"input_ids: got shape \(2,\), expected \(batch, seqlen\), each at least 1"),
    (torch.ones(2, 0, dtype=torch.int64), ValueError, r"input_ids: got shape \(2, 0\)"),
    *((torch.tensor([[3, token, 5]]), ValueError, f"input_ids: got {token}, expected tokens from 0 to 63")
      for token in (-1, 64)),
])
def test_bad_ids(ids, error, message):
    model = make_model()
    for call in (model, lambda ids: model.stream(ids, 1)):
        with pytest.raises(error, match=message):
            call(ids)


@pytest.mark.parametrize(("call", "message"), [
    (lambda model, ids: model(ids, cache=model.new_cache(2)[:1]), "cache: got that of 1 layers, expected one for each of 2"),
    (lambda model, ids: model.stream(ids, 2, model.new_cache(2)[:1]), "cache: got that of 1 layers, expected"),
    (lambda model, ids: model.stream(ids, 2, model.new_cache(3)), "cache: got one of batch 3, expected batch 2"),
    (lambda model, ids: model(ids, seq_idx=torch.zeros_like(ids), cache=model.new_cache(2)),
     "seq_idx: got a tensor with a cache"),
    (lambda model, ids: model.step(ids[:, 0], model.new_cache(1)), "cache: got one of batch 1, expected batch 2"),
])
def test_other_bad_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_model(), tokens("cpu"))


@pytest.mark.parametrize("name", ["step", "read", "forward"])
def test_a_bad_cache_of_one_layer_leaves_the_others(name):
    model, ids = make_model(), tokens("cpu")
    other, good = Mamba2(32, d_state=16, headdim=16), model.new_cache(2)
    call = partial(getattr(model, name), ids[:, 0] if name == "step" else ids)
    for cache, error, message in (([good[0], other.new_cache(2)], ValueError, r"cache.ssm_state: got shape \(2, 4, 16, 16\)"),
                                  ("xx", TypeError, "cache: got str, expected a Mamba2Cache"),
                                  (good[0], TypeError, "cache: got Mamba2Cache, .* of 2 layers, in a sequence, as model"),
                                  (3, TypeError, "cache: got int, expected a Mamba2Cache for each of 2 layers")):
        with pytest.raises(error, match=message), torch.no_grad():
            call(cache=cache)
    with pytest.raises(TypeError, match="cache: got NoneType, expected a Mamba2Cache for each of 2 layers"):
        model.step(ids[:, 0], None)
    assert not good[0].conv_state.any()


def test_a_cache_is_made_under_torch_compile():
    cache = torch.compile(make_model().new_cache, backend="eager")(2)
    assert type(cache) is Mamba2LMCache and len(cache) == 2


def test_a_config_that_is_none_is_refused():
    with pytest.raises(TypeError, match="config: got dict, expected Mamba2LMConfig"):
        Mamba2LM({"d_model": 32})


def test_a_dtype_that_is_not_floating_is_refused():
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8, expected one of"):
        Mamba2LM(Mamba2LMConfig(**SIZES), dtype=torch.int8)


def test_the_examples_of_the_docs_run(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    docs = Path(__file__).parents[2] / "docs" / "drop-in.md"
    if not docs.exists():
        pytest.skip("there are no docs")
    section = re.search(r"^## A language model.*?(?=^## |\Z)", docs.read_text(), re.M | re.S)[0]
    examples = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    for example in examples:
        exec(example, {})


def test_a_cache_holds_no_graph(device):
    """Of a call that somebody made with gradients on, or its memory would grow with each."""
    model, ids = make_model(device), tokens(device)
    cache = model.new_cache(2)
    model(ids, cache=cache)
    assert not any(t.requires_grad for layer in cache for t in (layer.conv_state, layer.ssm_state))
    assert_close(cache.copy()[0].ssm_state, cache[0].ssm_state)


def test_a_stream_outlives_inference_mode(device):
    model, ids = make_model(device), tokens(device)
    with torch.inference_mode():
        stream = model.stream(ids, 4, eos_token_id=0, graph=False)
        first = next(stream)
    assert torch.equal(torch.stack([first, *stream], 1), model.generate(ids, 4, eos_token_id=0)[:, -4:])
