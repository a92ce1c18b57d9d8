"""The block against itself: whole, in pieces, token by token, and packed; and what its parameters are called."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ssd.modules import Mamba2
from tests.refused import over_refusals

SIZES = {"d_model": 32, "d_state": 16, "headdim": 8, "chunk_size": 16}
SETTINGS = {
    "as it comes": {},
    "no norm": {"rmsnorm": False},
    "groups, norm first": {"ngroups": 2, "norm_before_gate": True, "bias": True, "conv_bias": False},
    "an MLP beside it": {"d_ssm": 32, "D_has_hdim": True},
    "limits": {"dt_limit": (0.01, 0.05), "d_conv": 3},
}
over_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def make_mixer(device: str, **settings) -> Mamba2:
    torch.manual_seed(0)
    block = Mamba2(**SIZES, **settings, device=device)
    for parameter in block.parameters():  # ones and zeros would hide what they multiply
        parameter.data += 0.1 * torch.randn_like(parameter)
    return block


def tokens(device: str, batch: int = 2, seqlen: int = 23) -> torch.Tensor:
    return torch.randn(batch, seqlen, SIZES["d_model"], generator=torch.Generator().manual_seed(1)).to(device)


def test_parameters_are_called_as_upstreams():
    block = Mamba2(64, d_state=32, headdim=16, ngroups=2, d_ssm=96)
    assert {name: tuple(t.shape) for name, t in block.state_dict().items()} == {
        "in_proj.weight": (2 * 32 + 2 * 96 + 2 * 64 + 6, 64), "conv1d.weight": (96 + 2 * 64, 1, 4),
        "conv1d.bias": (96 + 2 * 64,), "dt_bias": (6,), "A_log": (6,), "D": (6,), "norm.weight": (96,),
        "out_proj.weight": (64, 128)}
    assert Mamba2(64, D_has_hdim=True, rmsnorm=False, bias=True).state_dict().keys() == {
        "in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "out_proj.weight",
        "out_proj.bias"}


def test_how_it_begins():
    block = Mamba2(512, headdim=1, A_init_range=(2, 3), dt_min=0.01, dt_max=0.02, conv_init=0.5)
    steps, rates = torch.nn.functional.softplus(block.dt_bias), block.A_log.exp()
    assert 0.0099 < steps.min() < 0.0105 and 0.0195 < steps.max() < 0.0201
    assert 2 <= rates.min() < 2.05 and 2.95 < rates.max() <= 3
    assert 0.49 < block.conv1d.weight.abs().max() <= 0.5 and block.D.eq(1).all()
    assert all(getattr(block, name)._no_weight_decay for name in ("dt_bias", "A_log", "D"))


@pytest.mark.parametrize(("default", "dtype", "expected"), (
    (torch.bfloat16, None, torch.bfloat16), (torch.float16, torch.float32, torch.float32),
    (torch.float32, torch.float16, torch.float16), (torch.float64, None, torch.float64)), ids=str)
def test_dtypes_of_parameters(default, dtype, expected):
    """Whatever torch's default is; D in fp32 at least."""
    torch.set_default_dtype(default)
    try:
        block = Mamba2(**SIZES, dtype=dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for name, t in block.named_parameters() if name != "D"} == {expected}
    assert block.D.dtype == (torch.float64 if default == torch.float64 else torch.float32)
    assert all(t.isfinite().all() for t in block.parameters())


def test_the_norm_is_called_nowhere(device):
    """Its weights are taken, in a prompt and in a step alike."""
    block, u = make_mixer(device), tokens(device, seqlen=1)
    block.norm.register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        assert_close(block.step(u[:, 0], block.new_cache(2)), block(u)[:, 0], rtol=1e-4, atol=1e-5)


class _Twice(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(given)


@pytest.mark.parametrize("change", ("another class", "a module around it", "a hook"))
def test_the_last_projection_is_called(change, device):
    """As in a step, so that adapters and quantized weights are in effect."""
    block, u = make_mixer(device), tokens(device)
    plain, projection = block(u), block.out_proj
    twice = _Twice(64, 32, bias=False, device=device)
    twice.weight = projection.weight
    if change == "a hook":
        projection.register_forward_hook(lambda module, given, out: 2 * out)
    else:
        block.out_proj = twice if change == "another class" else torch.nn.Sequential(twice)
    assert_close(block(u), 2 * plain)
    with torch.no_grad():
        assert_close(block.finish(u, block.new_cache(2)), 2 * plain[:, -1])


@over_settings
@pytest.mark.parametrize("pieces", ([23], [1, 12, 10], [22, 1], [18]), ids=str)
def test_pieces_of_a_prompt_and_tokens_after_it_give_the_whole(settings, pieces, device):
    block, u = make_mixer(device, **settings), tokens(device)
    cache = block.new_cache(2)
    with torch.no_grad():
        parts = [block(part, cache=cache) for part in u[:, : sum(pieces)].split(pieces, 1)]
        parts += [block.step(token, cache)[:, None] for token in u[:, sum(pieces) :].unbind(1)]
        assert_close(torch.cat(parts, 1), block(u), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("settings", [given for given in SETTINGS.values() if given.get("rmsnorm", True)], ids=str)
def test_a_last_token_alone_is_that_of_the_whole(settings, state_dtype, device):
    block, u = make_mixer(device, **settings), tokens(device)
    near = {"rtol": 1e-4, "atol": 1e-5} if state_dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}  # a rounding apart
    expected, cache = (block.new_cache(2, state_dtype=state_dtype) for _ in range(2))
    with torch.no_grad():
        for piece in u.split([10, 13], 1):
            out, last = block(piece, cache=expected), block.finish(piece, cache)
            assert_close(last, out[:, -1], **near)
    for name in ("conv_state", "ssm_state"):
        assert_close(getattr(cache, name), getattr(expected, name), **near)


@over_settings
def test_packed_documents_are_apart(settings, device):
    block, u = make_mixer(device, **settings), tokens(device, 1)
    seq_idx = torch.tensor([[0] * 10 + [1] * 13], device=device)
    apart = torch.cat([block(part) for part in u.split([10, 13], 1)], 1)
    assert_close(block(u, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)


@over_settings
def test_packed_pieces_with_states(settings, device):
    """Training in pieces, and prefill: pieces of three sequences, packed, with states in and out, and every gradient."""
    block, rows = make_mixer(device, **settings), [tokens(device, 1, seqlen) for seqlen in (5, 23, 8)]
    expected = [block(u) for u in rows]
    sum(out.square().sum() for out in expected).backward()
    whole = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    states, cache, outs = None, block.new_cache(3), [[], [], []]
    for cuts in ((2, 0, 8), (3, 14, 0), (0, 9, 0)):
        taken = [sum(out.shape[1] for out in parts) for parts in outs]
        u = torch.cat([row[:, start : start + cut] for row, start, cut in zip(rows, taken, cuts, strict=True)], 1)
        cu_seqlens = torch.tensor([0, *cuts], device=device).cumsum(0)
        out, states = block(u, cu_seqlens=cu_seqlens, states=states, return_states=True)
        with torch.no_grad():
            assert_close(block(u, cu_seqlens=cu_seqlens, cache=cache), out)
        for parts, part in zip(outs, out.split(cuts, 1), strict=True):
            parts.append(part)
    for parts, row in zip(outs, expected, strict=True):
        assert_close(torch.cat(parts, 1), row, rtol=1e-4, atol=1e-5)
    sum(torch.cat(parts, 1).square().sum() for parts in outs).backward()
    assert_close({name: parameter.grad for name, parameter in block.named_parameters()}, whole, rtol=1e-3, atol=1e-4)
    assert_close(cache.ssm_state, states.ssm_state)


def test_bad_states(device):
    block, u = make_mixer(device), tokens(device, 1)
    ends, cache = torch.tensor([0, 10, 23], device=device), block.new_cache(1)
    for given, message in (
            ({"cu_seqlens": ends, "states": cache}, "states: got one of batch 1, expected batch 2, the documents of cu"),
            ({"states": block.new_cache(2)}, "states: got one of batch 2, expected batch 1, that of u"),
            ({"cache": cache, "states": cache}, "states: got them with a cache"),
            ({"seq_idx": ends, "return_states": True}, "return_states: got True with seq_idx"),
            ({"seq_idx": ends, "cu_seqlens": ends}, "seq_idx: got a tensor with cu_seqlens"),
            ({"cu_seqlens": ends[:1]}, r"cu_seqlens: got shape \(1,\)")):
        with pytest.raises(ValueError, match=message):
            block(u, **given)


@over_settings
def test_every_parameter_has_a_gradient(settings, device):
    block = make_mixer(device, **settings)
    block(tokens(device)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in block.parameters())


def test_half_precision(device):
    """Weights and tokens in it; steps, rates and the state in fp32."""
    half = torch.bfloat16 if device == "cuda" else torch.float16
    block, u = make_mixer(device), tokens(device)
    expected = block(u)
    cache = block.to(half).new_cache(2)
    assert cache.conv_state.dtype == half and cache.ssm_state.dtype == torch.float32
    with torch.no_grad():
        assert_close(block(u.to(half)).float(), expected, rtol=0.1, atol=0.1)
        assert_close(block(u.to(half), cache=cache).float(), expected, rtol=0.1, atol=0.1)
        assert block.step(u[:, 0].to(half), cache).dtype == half


@over_refusals(Path(__file__).with_name("refused.txt"), "Mamba2")
def test_bad_settings(refusal):
    refusal.check(Mamba2, SIZES)


@pytest.mark.parametrize("shape", [(10, 32), (2, 10, 31), (2, 0, 32), (2, 1, 10, 32)], ids=str)
def test_bad_tokens(shape, device):
    expected = r"expected \(batch, seqlen, d_model = 32\), each at least 1"
    with pytest.raises(ValueError, match=rf"u: got shape {re.escape(str(shape))}, {expected}"):
        make_mixer(device)(torch.zeros(shape, device=device))


def test_a_cache_of_another_batch(device):
    block, u = make_mixer(device), tokens(device)
    for call in (lambda: block(u, cache=block.new_cache(1)), lambda: block.step(u[:, 0], block.new_cache(1))):
        with pytest.raises(ValueError, match="cache: got one of batch 1, expected batch 2, that of u"):
            call()


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda good: None, TypeError, ": got NoneType, expected a Mamba2Cache"),
    (lambda good: good.ssm_state, TypeError, ": got Tensor, expected a Mamba2Cache"),
    (lambda good: replace(good, ssm_state=good.ssm_state.view(2, 4, 16, 16)), ValueError,
     r".ssm_state: got shape \(2, 4, 16, 16\), expected \(2, 8, 8, 16\) for this block"),
    (lambda good: replace(good, conv_state=good.conv_state[..., 1:]), ValueError, r".conv_state: got shape \(2, 96, 2\)"),
    (lambda good: replace(good, ssm_state=good.ssm_state.int()), TypeError, ".ssm_state: got dtype torch.int32"),
    (lambda good: replace(good, ssm_state=good.ssm_state.to("meta")), ValueError, ".ssm_state: got a tensor on meta, expected"),
    (lambda good: replace(good, ssm_state=0), TypeError, ".ssm_state: got int, expected a tensor of shape"),
], ids=("none", "a tensor", "other heads", "another width", "integers", "another device", "no tensor"))
def test_what_is_no_cache_of_this_block_is_not_written(change, error, message, device):
    block, u = make_mixer(device), tokens(device)
    good = block.new_cache(2)
    bad = change(good)
    calls = {"cache": [lambda: block.step(u[:, 0], bad), lambda: block.prefill(u, torch.ones(2, 23, device=device) > 0, bad)]}
    if bad is not None:
        calls["cache"].append(lambda: block(u, cache=bad))
        calls["states"] = [lambda: block(u, states=bad)]
    for name, called in calls.items():
        for call in called:
            with pytest.raises(error, match=f"^{name}{message}"), torch.no_grad():
                call()
    assert not good.conv_state.any() and not good.ssm_state.any()


@pytest.mark.parametrize("field", ["conv_state", "ssm_state"])
def test_a_cache_whose_elements_share_memory_is_not_written(field, device):
    block, u = make_mixer(device), tokens(device)
    good = block.new_cache(2)
    bad = replace(good, **{field: getattr(good, field)[:1].expand_as(getattr(good, field))})
    for call in (lambda: block(u, cache=bad), lambda: block.step(u[:, 0], bad), lambda: block.finish(u, bad),
                 lambda: block.prefill(u, torch.ones(2, 23, device=device) > 0, bad)):
        with pytest.raises(ValueError, match=rf"^cache\.{field}: got a stride of 0 along axis 0"), torch.no_grad():
            call()
    assert not good.conv_state.any() and not good.ssm_state.any()
    block(u, states=bad)


@pytest.mark.parametrize("settings", [{}, {"dt_limit": (0.01, 0.05)}], ids=str)
def test_rates_are_in_fp64_where_the_weights_are(settings):
    block, u = make_mixer("cpu", **settings).double(), tokens("cpu", 1, 3).double()
    A_log = block.A_log.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda A_log: torch.func.functional_call(block, {"A_log": A_log}, (u,)), A_log)
    cache = block.new_cache(1, state_dtype=torch.float64)
    with torch.no_grad():
        steps = torch.stack([block.step(token, cache) for token in u.unbind(1)], 1)
    assert_close(steps, block(u), rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("settings", [{}, {"ngroups": 2}], ids=str)
def test_torch_jit_traces_it(settings):
    block, u = make_mixer("cpu", **settings), tokens("cpu")
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(block, u)(u), block(u))


def test_bad_rates_of_a_step_leave_the_cache(device):
    block, u = make_mixer(device), tokens(device)
    cache = block.new_cache(2)
    with pytest.raises(ValueError, match=r"A: got shape \(3,\), expected \(8,\)"), torch.no_grad():
        block.step(u[:, 0], cache, torch.zeros(3, device=device))
    assert not cache.conv_state.any()


def test_a_cache_outlasts_the_mode_that_it_was_made_in(device):
    block, u = make_mixer(device), tokens(device)
    with torch.inference_mode():
        cache = block.new_cache(2)
        block(u, cache=cache)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            block(u, cache=cache)
            block.step(u[:, 0], cache)


@over_refusals(Path(__file__).with_name("refused.txt"), "new_cache")
def test_a_cache_that_cannot_be(refusal):
    refusal.check(make_mixer("cpu").new_cache, {"batch": 2})


def test_an_input_of_another_dtype_is_named():
    block, u = make_mixer("cpu"), tokens("cpu").double()
    for call in (block, lambda u: block.step(u[:, 0], block.new_cache(2))):
        with pytest.raises(TypeError, match=r"u: got dtype torch\.float64, expected torch\.float32, that of the weights"):
            call(u)
