"""A token's launches: a few sequences take three a layer, more take six, and both are the step of the block's functions."""

import pytest
import torch

from ssd.modules import token_step
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.inputs import GPU
from tests.modules.test_language_model import LAYER, follow, make_model, tokens

TOKENS = 5 if GPU else 2
WIDE = LAYER | {"headdim": 32, "d_state": 16}
SETTINGS = {
    "as it comes": {"ssm_cfg": WIDE},
    "norms of groups": {"ssm_cfg": WIDE | {"ngroups": 2, "expand": 4}},
    "biases, limits": {"ssm_cfg": WIDE | {"bias": True, "dt_limit": [0.01, 0.05]}},
    "norm first": {"ssm_cfg": WIDE | {"norm_before_gate": True}},
    "no norm, no bias, two taps": {"ssm_cfg": WIDE | {"rmsnorm": False, "conv_bias": False, "d_conv": 2}},
    "a residual stream of 16 bits": {"ssm_cfg": WIDE, "residual_in_fp32": False},
}


@pytest.fixture
def kernels(monkeypatch, device) -> list[str]:
    """Where kernels are interpreted on a CPU too; the functions of `token_step` that were called."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", device == "cpu")
    monkeypatch.setattr(token_step, "_DTYPES", (torch.float16,))  # which the interpreter gets right
    found = []
    for name in ("project_in", "project_out", "residual_norm"):
        call = getattr(token_step, name)
        monkeypatch.setattr(token_step, name, lambda *given, call=call, name=name: (found.append(name), call(*given))[1])
    return found


def assert_as_near(name: str, ours: torch.Tensor, other: torch.Tensor, truth: torch.Tensor) -> None:
    """To the truth as another way with the same weights of 16 bits, or about so."""
    off, others = ((t.double() - truth.double()).norm() for t in (ours, other))
    assert off < 2 * others + 1e-4 * truth.norm(), name


@pytest.mark.parametrize("batch", (1, 2, 3, 70) if GPU else (2, 3))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@torch.no_grad()
def test_launches_are_the_step(settings, batch, device, kernels, monkeypatch):
    """About as near to the step in fp32 as the block's functions are with the same weights of 16 bits."""
    model, ids = make_model(device, d_model=64, **settings).half(), tokens(device, batch, TOKENS)
    cache = model.new_cache(batch)
    got = torch.stack([model.step(token, cache) for token in ids.unbind(1)])
    few = batch <= 2 and not settings["ssm_cfg"].get("norm_before_gate")
    assert kernels.count("project_in") == kernels.count("project_out") == 2 * TOKENS * few
    assert kernels.count("residual_norm") == TOKENS * (1 if few else 3)
    monkeypatch.setattr(token_step, "takes_three_launches", lambda *_: False)
    monkeypatch.setattr(token_step, "_takes_norm", lambda *_: False)
    results = {}
    kernels.clear()
    for name, other in (("half", model), ("fp32", make_model(device, d_model=64, **settings).half().float())):
        its_cache = other.new_cache(batch)
        results[name] = torch.stack([other.step(token, its_cache) for token in ids.unbind(1)])
        results[name, "cache"] = its_cache
    for name, ours, half, truth in (("logits", got, results["half"], results["fp32"]), *(
            (name, getattr(ours, name), getattr(half, name), getattr(truth, name)) for ours, half, truth in
            zip(cache, results["half", "cache"], results["fp32", "cache"], strict=True)
            for name in ("conv_state", "ssm_state"))):
        assert_as_near(name, ours, half, truth)


def test_what_takes_more_launches(device, kernels, monkeypatch):
    """Weights in fp32, an MLP beside the SSD, LayerNorm, modules of another kind, and gradients that are wanted."""
    half = make_model(device, d_model=64).half()
    others = {"fp32": make_model(device, d_model=64), "an MLP": make_model(device, ssm_cfg=LAYER | {"d_ssm": 32}).half(),
              "LayerNorm": make_model(device, rms_norm=False).half()}
    wrapped, biased, grouped = (make_model(device, d_model=64).half() for _ in range(3))
    wrapped.backbone.layers[0].mixer.in_proj = torch.nn.Sequential(wrapped.backbone.layers[0].mixer.in_proj)
    biased.backbone.layers[0].mixer.norm.bias = torch.nn.Parameter(torch.ones(128, device=device).half())
    grouped.backbone.layers[0].mixer.norm.group_size = 32
    others |= {"another projection": wrapped, "a bias of the norm": biased, "short groups": grouped}

    def takes(model):
        layer, residual = model.backbone.layers[0], torch.zeros(2, model.config.d_model, device=device)
        return token_step.takes_three_launches(layer, residual, model.new_cache(2)[0])

    with torch.no_grad():
        assert takes(half)
        assert not [name for name, model in others.items() if takes(model)]
        with monkeypatch.context() as patch:
            patch.setattr(token_step, "_DTYPES", (torch.bfloat16,))
            assert not takes(half), "fp16, which gated outputs may exceed"
    assert not takes(half)
    half.requires_grad_(False)
    assert takes(half)
    half.backbone.layers[0].mixer.in_proj.weight.requires_grad_()
    assert not takes(half), "as in fine-tuning that leaves the norms as they are"


@pytest.mark.parametrize("way", ("hook", "hook of all", "forward"))
@torch.no_grad()
def test_what_somebody_keeps_is_not_overwritten(way, device, kernels, monkeypatch):
    """Of a norm, and by whoever wraps the forward of a module, as accelerate does."""
    model, ids, kept = make_model(device, d_model=64, ssm_cfg=WIDE, residual_in_fp32=False).half(), tokens(device), []

    def keep(module, given):
        kept.append((given[0], given[0].clone()))

    norm = model.backbone.layers[1].norm
    if way == "forward":
        monkeypatch.setattr(norm, "forward", lambda t, forward=norm.forward: (keep(norm, (t,)), forward(t))[1])
    elif way == "hook":
        norm.register_forward_pre_hook(keep)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(keep) if way == "hook of all" else None
    try:
        model.step(ids[:, 0], model.new_cache(2))
        model.float()(ids[:, 1:5])
    finally:
        if handle:
            handle.remove()
    assert len(kept) >= 2 and not kernels and all(torch.equal(t, before) for t, before in kept)


def test_rates_of_all_layers(device):
    """At once in inference; each layer's by itself where a backward may follow."""
    model = make_model(device)
    layers = model.backbone.layers
    assert token_step.compute_rates(layers) == [None, None]
    with torch.no_grad():
        rates = token_step.compute_rates(layers)
        assert {A.dtype for A in token_step.compute_rates(make_model(device).double().backbone.layers)} == {torch.float64}
    assert all(torch.equal(A, -layer.mixer.A_log.exp()) for A, layer in zip(rates, layers, strict=True))
    model(tokens(device)).sum().backward()
    assert all(layer.mixer.A_log.grad.abs().sum() > 0 for layer in layers)


@torch.no_grad()
def test_nothing_is_overwritten(device, kernels):
    """What the embedding gives, and what a norm of somebody's own keeps, by a step and by a prompt."""
    kept = []

    class Keeping(torch.nn.RMSNorm):
        def forward(self, x):
            kept.append((x, x.clone()))
            return super().forward(x)

    class Prompt(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_embeddings, self.given = 64, torch.randn(2, 64, device=device).half()

        def forward(self, ids):
            return self.given if ids.dim() == 1 else self.given[:, None]

    model, ids = make_model(device, d_model=64, n_layer=3, ssm_cfg=WIDE, residual_in_fp32=False).half(), tokens(device)
    model.backbone.embedding = Prompt()
    own = Keeping(64, eps=1e-5).to(device).half()
    model.backbone.layers[1].norm = own
    before = model.backbone.embedding.given.clone()
    model.step(ids[:, 0], model.new_cache(2))
    model(ids[:, :1])
    assert {"project_out", "residual_norm"} <= set(kernels)
    assert torch.equal(model.backbone.embedding.given, before)
    assert len(kept) == 2 and all(torch.equal(t, copy) for t, copy in kept)


@pytest.mark.parametrize("width", (1, 32, 64))
def test_sums_of_other_sizes(width, device, kernels):
    """As where somebody has cut out_proj: no launch reads past what there is."""
    made = {"device": device, "dtype": torch.float16}
    norm, residual, added = torch.nn.RMSNorm(64, eps=1e-5, **made), torch.zeros(2, 64, **made), torch.ones(2, width, **made)
    with torch.no_grad():
        if width == 32:
            with pytest.raises(RuntimeError, match="32"):
                token_step.add_and_norm(norm, residual, added, seen=False)
        else:
            assert torch.equal(token_step.add_and_norm(norm, residual, added, seen=False)[0], residual + 1)
    assert kernels == ["residual_norm"] * (width == 64)


@pytest.mark.parametrize("way", ("hook", "hook of all", "forward"))
@pytest.mark.parametrize("which", ("backbone", "mixer"))
def test_what_is_called_in_a_prompt_is_called_in_a_step(which, way, device, monkeypatch):
    """Somebody's code around the backbone or around a block."""
    model, ids = make_model(device), tokens(device)
    mask = torch.ones_like(ids).index_fill(1, torch.zeros(1, dtype=torch.int64, device=device), 0)
    module = model.backbone if which == "backbone" else model.backbone.layers[0].mixer
    plain = model.generate(ids, 4)

    def change(called, given, out):
        return out.roll(1, -1) if called is module else None

    if way == "forward":
        monkeypatch.setattr(module, "forward", lambda *args, forward=module.forward, **more: forward(*args, **more).roll(1, -1))
    elif way == "hook":
        module.register_forward_hook(change)
    handle = torch.nn.modules.module.register_module_forward_hook(change) if way == "hook of all" else None
    try:
        got = model.generate(ids, 4)
        assert torch.equal(got, follow(model, ids, 4)) and not torch.equal(got, plain)
        padded = model.generate(ids, 4, attention_mask=mask)
        assert torch.equal(padded[:, 1:], model.generate(ids[:, 1:], 4)), "and in a padded prompt"
    finally:
        if handle:
            handle.remove()
