"""split_conv1d_scan against the definitions of its parts in fp64, in outputs, states and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from ssd import reference
from ssd.block import split_conv1d_scan as module
from ssd.block.conv1d_scan_norm import conv1d_scan_norm
from ssd.block.split_conv1d_scan import split_conv1d_scan
from ssd.types import SSDInputs
from tests.block import test_conv1d, test_gated_norm
from tests.block.calls import assert_within, move, run
from tests.inputs import OURS, generator

BATCH, SEQLEN, NHEADS, HEADDIM, NGROUPS, DSTATE, WIDTH = 2, 19, 4, 8, 2, 16, 4
DIM, GROUP = NHEADS * HEADDIM, NGROUPS * DSTATE
BOUND = 2e-5  # of a tensor's norm

CASES = {
    "gate alone": {"norm": False, "outproj_bias": False},
    "gate alone, no projection": {"norm": False, "outproj": False, "outproj_bias": False, "D_hp": True, "mlp": 6},
    "norm after gate": {"norm_before_gate": False, "seq_idx": True, "mlp": 6},
    "norm before gate": {"initial_states": True, "final": True, "outproj_bias": False, "D_hp": True},
    "documents": {"seq_idx": True, "initial_states": True, "final": True, "dt_limit": [0.3, 0.9], "norm": False},
    "no activation": {"activation": None, "conv_bias": False, "outproj": False, "outproj_bias": False, "final": True},
}


def draw_arguments(norm=True, outproj=True, outproj_bias=True, conv_bias=True, D_hp=False, seq_idx=False, initial_states=False,
                   mlp=0, final=False, seqlen=SEQLEN, conv_states=False, **settings) -> dict:
    """Arguments with random tensors in fp32."""
    rng = generator("cpu", norm, outproj, D_hp, seq_idx, mlp)

    def normal(*size):
        return torch.randn(size, generator=rng)

    documents = torch.tensor([[0] * 7 + [1] + [2] * 11, [3] * 16 + [4] * 3], dtype=torch.int32)
    return {
        "zxbcdt": normal(BATCH, seqlen, 2 * mlp + 2 * DIM + 2 * GROUP + NHEADS),
        "conv1d_weight": normal(DIM + 2 * GROUP, WIDTH),
        "conv1d_bias": normal(DIM + 2 * GROUP) if conv_bias else None,
        "dt_bias": normal(NHEADS),
        "A": -normal(NHEADS).exp(),
        "D": normal(NHEADS, HEADDIM) if D_hp else normal(NHEADS),
        "chunk_size": 16,
        "initial_states": normal(BATCH, NHEADS, HEADDIM, DSTATE) if initial_states else None,
        "seq_idx": documents if seq_idx else None,
        "return_final_states": final,
        "rmsnorm_weight": normal(DIM) if norm else None,
        "rmsnorm_eps": 1e-5 if norm else None,
        "outproj_weight": normal(24, mlp + DIM) if outproj else None,
        "outproj_bias": normal(24) if outproj_bias else None,
        "conv_states": normal(BATCH, DIM + 2 * GROUP, WIDTH - 1) if conv_states else None,
        "headdim": None if D_hp else HEADDIM,
        "ngroups": NGROUPS,
        **settings,
    }


def definition(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, rmsnorm_weight,
               rmsnorm_eps, outproj_weight, outproj_bias, dt_limit=(0.0, float("inf")), activation="silu",
               norm_before_gate=True, **_):
    """By the definitions of the convolution, of the operator and of the norm."""
    mlp = (zxbcdt.shape[-1] - 2 * DIM - 2 * GROUP - NHEADS) // 2
    z0, x0, z, xBC, dt = zxbcdt.split([mlp, mlp, DIM, DIM + 2 * GROUP, NHEADS], -1)
    xBC = test_conv1d.definition(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = (t.unflatten(-1, (n, -1)) for t, n in zip(xBC.split([DIM, GROUP, GROUP], -1), (NHEADS, NGROUPS, NGROUPS),
                                                        strict=True))
    y, state = reference.recurrence(SSDInputs(x, dt, A, B, C, chunk_size, D, None, dt_bias, initial_states, seq_idx,
                                              dt_softplus=True, dt_limit=tuple(dt_limit)))
    y = y.flatten(2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        y = test_gated_norm.definition(y, rmsnorm_weight, None, z, rmsnorm_eps, DIM // NGROUPS, norm_before_gate)
    y = torch.cat([F.silu(z0) * x0, y], -1)
    return (y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)), state


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_states_and_gradients(case, device):
    given = move(draw_arguments(**case), device)
    got, final = split_conv1d_scan(**given), given["return_final_states"]
    assert isinstance(got, tuple) == final and all(t.dtype == torch.float32 for t in (got if final else (got,)))
    assert_within(split_conv1d_scan, definition, given, ("out", "final_states") if final else ("out",), BOUND)


def test_the_projection_under_autocast(device):
    given = move(draw_arguments(), device)
    with torch.autocast(device, torch.bfloat16):
        got, _ = run(split_conv1d_scan, given, ("outproj_weight",))
    assert got["out"].dtype == torch.bfloat16 and got["doutproj_weight"].dtype == torch.float32
    torch.testing.assert_close(got["out"].float(), split_conv1d_scan(**given), rtol=0.05, atol=0.2)


WAYS = {
    "all": {"D_hp": True, "mlp": 6, "initial_states": True, "final": True, "conv_states": True, "return_conv_states": True},
    "documents": {"seq_idx": True, "conv_bias": False, "norm_before_gate": False},
    "bounds": {"cu_seqlens": True, "padded": 5, "activation": None},
    "padded rows": {"padded": 3, "initial_states": True, "outproj": False, "outproj_bias": False},
}


@pytest.mark.parametrize("variant", OURS)
@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_one_op_gives_the_bits_of_its_parts(case, variant, device, monkeypatch):
    """Outputs, states and gradients, though it writes these where others lie beside them."""
    settings = dict(case)
    cu_seqlens, padded = (settings.pop(name, None) for name in ("cu_seqlens", "padded"))
    given = move(draw_arguments(variant=variant, **settings), device)
    if cu_seqlens:
        given |= {"zxbcdt": given["zxbcdt"][:1], "cu_seqlens": torch.tensor([0, 5, 5, 16, SEQLEN], device=device)}
    if padded:
        given["zxbcdt"] = F.pad(given["zxbcdt"], (0, padded))[..., :-padded]

    def compute() -> list[torch.Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()
                  if isinstance(t, torch.Tensor) and t.is_floating_point()}
        out = split_conv1d_scan(**given | leaves)
        outs = out if isinstance(out, tuple) else (out,)
        return [*outs, *torch.autograd.grad(outs, [*leaves.values()], [torch.ones_like(t) + t.detach() for t in outs])]

    calls = []
    monkeypatch.setattr(module, "conv1d_scan_norm", lambda *args: calls.append(args) or conv1d_scan_norm(*args))
    in_one = compute()
    monkeypatch.setattr(module, "takes_kernels", lambda x: False)
    by_parts = compute()
    assert len(calls) == 1 and len(in_one) == len(by_parts)
    assert all(torch.equal(a, b) for a, b in zip(in_one, by_parts, strict=True))


@pytest.mark.parametrize("lay_out", [lambda t: t.mT.contiguous(), lambda t: (t * 2).mT, lambda t: t.mT],
                         ids=("contiguous", "computed", "a view"))
def test_compiled_with_other_strides(lay_out, device):
    """inductor gives an op that takes any strides those that it likes best, whatever the caller made of them."""
    given = move(draw_arguments(outproj=False, outproj_bias=False, variant=OURS[0]), device)
    turned = given.pop("zxbcdt").mT.contiguous()
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: split_conv1d_scan(lay_out(t), **given), fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(turned), split_conv1d_scan(lay_out(turned), **given))
