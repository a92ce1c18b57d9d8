"""Long prompts whose gated norms are finished after the projection: the logits and states of a prompt whose are not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ssd import registry
from ssd.block.kernels.residual_norm import Unscaled
from ssd.modules import Mamba2, deferred_norm, language_model, token_step
from ssd.registry import get_variant
from tests.fused import test_hopper
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.inputs import GPU
from tests.modules.test_language_model import LAYER, make_model, tokens
from tests.modules.test_token_step import assert_as_near

pytestmark = pytest.mark.skipif(GPU and not test_hopper.GPU, reason="needs a GPU of compute capability 9, or none")
HALF = torch.bfloat16 if GPU else torch.float16  # which the interpreter gets right
WIDE = LAYER | {"headdim": 64, "d_state": 64}
LENGTH = 200 if GPU else 9


def scan_in_torch(i, options, weight):
    """`Variant.scan_deferring_norm` of a variant that there is on a CPU."""
    y, final_states, _ = get_variant("torch").forward(replace(i, z=None), options, False)
    gated = y.float() * F.silu(i.z.float())
    return (gated * weight.float()).to(y.dtype), final_states, gated.square().sum(-1)


@pytest.fixture
def sums(monkeypatch, device) -> list[bool]:
    """Whether each sum had a factor. Prompts of any length are long; on a CPU kernels are interpreted, and the scan is torch's.
    """
    monkeypatch.setattr(deferred_norm, "SHORTEST", 1)
    if not GPU:
        monkeypatch.setattr("ssd.block.arguments.INTERPRETED", True)
        monkeypatch.setattr(token_step, "_DTYPES", (HALF,))
        monkeypatch.setattr(deferred_norm, "resolve", lambda *_: SimpleNamespace(
            scan_deferring_norm=scan_in_torch, explain_no_deferred_norm=lambda *_: None))
    found, call = [], token_step.residual_norm
    monkeypatch.setattr(token_step, "residual_norm",
                        lambda *given: (found.append(isinstance(given[1], Unscaled)), call(*given))[1])
    return found


def make(device, layer=WIDE, **settings):
    return make_model(device, **{"d_model": 64, "n_layer": 3, "ssm_cfg": layer} | settings).to(HALF)


def takes(model, device, index=0) -> bool:
    """Of the layer of that number."""
    stream = torch.zeros(1, LENGTH, model.config.d_model, device=device)
    return deferred_norm.find_scan(model.backbone.layers[index], stream, model.new_cache(1)[index]) is not None


@pytest.mark.parametrize(("batch", "more"), ((1, {}), (2, {"dt_limit": [0.01, 0.02], "D_has_hdim": True, "conv_bias": False})),
                         ids=("as it comes", "with settings"))
@torch.no_grad()
def test_it_is_the_prompt(batch, more, device, sums, monkeypatch):
    """About as near to the prompt in fp32 as with the norm in a launch of its own; in two pieces, so that states are given."""
    ids = tokens(device, batch, LENGTH)

    def run(model):
        cache = model.new_cache(batch)
        return [model.read(piece, cache=cache) for piece in ids.split(LENGTH - 4, 1)], cache

    layer = WIDE | more
    got = run(make(device, layer))
    assert sums == 2 * [False, True, True, False], "the last layer has a way of its own, for the last token"
    monkeypatch.setattr(language_model, "find_scan", lambda *_: None)
    half = run(make(device, layer))
    assert not any(sums[8:])
    monkeypatch.setattr(token_step, "_takes_norm", lambda *_: False)
    truth = run(make(device, layer).float())
    for ours, other, true in (*zip(got[0], half[0], truth[0], strict=True), *(
            (getattr(one, name), getattr(two, name), getattr(three, name)) for one, two, three in
            zip(got[1], half[1], truth[1], strict=True) for name in ("conv_state", "ssm_state"))):
        assert_as_near("logits or states", ours, other, true)


@torch.no_grad()
def test_a_norm_of_another_kind_comes_after(device, sums):
    """The factor is then torch's."""
    model, ids = make(device), tokens(device, 1, LENGTH)
    expected = model.read(ids, cache=model.new_cache(1))
    scale, factors = Unscaled.scale, []
    for layer in model.backbone.layers[2:]:
        weight, layer.norm = layer.norm.weight, type("Norm", (torch.nn.RMSNorm,), {})(64, eps=1e-5)
        layer.norm.weight = weight
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Unscaled, "scale", lambda added: (factors.append(added), scale(added))[1])
        got = model.read(ids, cache=model.new_cache(1))
    assert len(factors) == 1 and (got - expected).norm() < 1e-2 * expected.norm()


def _change(model, path, value):
    """Of each block, which is returned."""
    name, attribute = path.split(".")
    for layer in model.backbone.layers:
        setattr(getattr(layer.mixer, name), attribute, value)
    return model


OTHERS = {
    "groups": lambda device: make(device, WIDE | {"ngroups": 2}),
    "norm first": lambda device: make(device, WIDE | {"norm_before_gate": True}),
    "no norm": lambda device: make(device, WIDE | {"rmsnorm": False}),
    "biases": lambda device: make(device, WIDE | {"bias": True}),
    "an MLP": lambda device: make(device, WIDE | {"d_ssm": 64}),
    "fp32": lambda device: make(device).float(),
    "groups, one norm": lambda device: _change(make(device, WIDE | {"ngroups": 2}), "norm.group_size", 128),
    "one bias": lambda device: _change(make(device, WIDE | {"bias": True}), "out_proj.bias", None),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_it_does_not_take(name, device, sums):
    model = OTHERS[name](device)
    assert not takes(model, device)
    model.read(tokens(device, 1, LENGTH), cache=model.new_cache(1))
    assert not any(sums)


def _set(path: str, value: object):
    """A change of a model's first layer: the attribute at that path."""
    def change(model, monkeypatch) -> None:
        *owners, name = path.split(".")
        owner = model.backbone.layers[0]
        for one in owners:
            owner = getattr(owner, one)
        monkeypatch.setattr(owner, name, value(owner) if callable(value) else value, raising=False)
    return change


def _add_variant(model, monkeypatch) -> None:
    monkeypatch.setitem(registry._ADDED, "mine", replace(get_variant("torch"), name="mine", scan_deferring_norm=scan_in_torch,
                                                         explain_no_deferred_norm=lambda *_: None))
    model.backbone.layers[0].mixer.variant = "mine"


CHANGES = {
    "a subclass": _set("mixer", lambda layer: _as_subclass(layer.mixer)),
    "another order": _set("mixer.norm_before_gate", True),
    "a norm of one's own": _set("mixer.norm", lambda mixer: torch.nn.RMSNorm(mixer.d_ssm).to(mixer.norm.weight)),
    "a norm before of one's own": _set("norm", lambda layer: torch.nn.LayerNorm(64).to(layer.norm.weight)),
    "checks of values": lambda model, monkeypatch: monkeypatch.setattr("ssd.runtime.value_checks.ENABLED", True),
    "a group": _set("mixer.context_group", object()),
    "a method replaced": _set("mixer._mix", lambda mixer: mixer._mix),
    "a class patched": lambda model, monkeypatch: monkeypatch.setattr(
        Mamba2, "forward", lambda self, *given, **more: Mamba2._mix(self, *given, **more)),
    "compiled in place": lambda model, monkeypatch: model.backbone.layers[0].mixer.compile(backend="eager"),
    "a projection compiled": lambda model, monkeypatch: model.backbone.layers[0].mixer.in_proj.compile(backend="eager"),
    "eps of 0": _set("mixer.norm.eps", 0),
    "a variant of one's own": _add_variant,
    "a peer": _set("mixer.variant", "mamba_ssm"),
    "no variant": _set("mixer.variant", lambda mixer: ["fused"]),
}


def _as_subclass(mixer):
    mixer.__class__ = type("Mine", (Mamba2,), {})
    return mixer


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_is_somebody_elses(name, device, sums, monkeypatch):
    """The other layers are taken all the same, where only the first was changed."""
    model = make(device)
    assert takes(model, device)
    CHANGES[name](model, monkeypatch)
    assert not takes(model, device)
    assert takes(model, device, 1) == (name not in ("checks of values", "a class patched"))


@torch.no_grad()
def test_layers_that_are_wrapped(device, sums):
    """By what gives its inner module's attributes, as torch.compile and checkpoint wrappers do."""
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    model, ids = make(device), tokens(device, 1, LENGTH)
    expected = model.generate(ids, 2, graph=False)
    model.backbone.layers[0] = Wrapped(model.backbone.layers[0])
    assert torch.equal(model.generate(ids, 2, model.new_cache(1), graph=False), expected)


def _cut(path: str, *index):
    """The first layer's weight at that path, of which there is less."""
    def change(model, monkeypatch) -> None:
        weight = model.backbone.layers[0].get_submodule(path).weight
        monkeypatch.setattr(weight, "data", weight[index].contiguous())
    return change


_HALF = slice(32)
REFUSED = {
    "no eps": (_set("mixer.norm.eps", None), "eps: got None"),
    "eps below 0": (_set("mixer.norm.eps", -1.0), "eps: got -1.0"),
    "fewer columns in": (_cut("mixer.in_proj", slice(None), _HALF), "32"),
    "fewer rows in": (_cut("mixer.in_proj", _HALF), "zxbcdt: got 32"),
    "fewer columns out": (_cut("mixer.out_proj", slice(None), _HALF), "shapes cannot be multiplied"),
    "fewer taps": (_cut("mixer.conv1d", slice(None), slice(None), slice(1)), "width of 1"),
    "less of a norm": (_cut("norm", _HALF), "32"),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
@torch.no_grad()
def test_what_is_wrong_is_refused(change, error, device, sums, monkeypatch):
    model = make(device)
    change(model, monkeypatch)
    cache = model.new_cache(1)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=error):
        model.read(tokens(device, 1, LENGTH), cache=cache)
    assert not any(layer.ssm_state.any() for layer in cache)


@torch.no_grad()
def test_when_it_does_not(device, sums, monkeypatch):
    """Short prompts, tokens with a mask, modules that somebody looks into, weights that want gradients, no cache."""
    model, ids = make(device), tokens(device, 1, LENGTH)
    assert takes(model, device)
    with torch.enable_grad():
        assert not takes(model, device)
        for parameter in model.backbone.layers.parameters():
            parameter.requires_grad_(False)
        assert takes(model, device)
        layer, stream = model.backbone.layers[0], torch.zeros(1, LENGTH, 64, device=device)
        for wanted in (layer.norm.weight, stream):
            wanted.requires_grad_()
            assert deferred_norm.find_scan(layer, stream, model.new_cache(1)[0]) is None
            wanted.requires_grad_(False)
    model.read(ids, torch.ones_like(ids, dtype=torch.bool), model.new_cache(1))
    model(ids)
    hook = model.backbone.layers[1].mixer.register_forward_hook(lambda *_: None)
    model.read(ids, cache=model.new_cache(1))
    hook.remove()
    with pytest.raises(ValueError, match="seq_idx: got a tensor with a cache"):
        model(ids, torch.zeros_like(ids), model.new_cache(1))
    monkeypatch.setattr(deferred_norm, "SHORTEST", 64 * LENGTH + 1)
    model.read(ids, cache=model.new_cache(1))
    assert sums and not any(sums)


@pytest.mark.skipif(not GPU, reason="needs CUDA graphs")
@torch.no_grad()
def test_replays_are_the_same_bits(device, sums):
    model, ids = make(device).eval(), tokens(device, 1, LENGTH)
    cache, states = model.new_cache(1), []
    for _ in range(4):
        cache.reset()
        model.generate(ids, 1, cache)
        states.append([layer.ssm_state.clone() for layer in cache])
    assert any(sums) and cache.captured.has_replay(ids)
    for other in states[1:]:
        assert all(map(torch.equal, states[0], other))
    cache.reset()
    replayed = cache.captured.read(ids, None)[0].clone()
    cache.reset()
    assert torch.equal(model.read(ids, cache=cache), replayed)
