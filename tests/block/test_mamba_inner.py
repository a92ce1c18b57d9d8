"""mamba_inner_fn against the definitions of its parts in fp64, in its output and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.block.mamba_inner import mamba_inner_fn
from tests.block import test_conv1d, test_selective_scan
from tests.block.calls import assert_within, move
from tests.inputs import HALF, generator

BATCH, DIM, SEQLEN, DSTATE, RANK, WIDTH, OUT = 2, 4, 11, 3, 2, 4, 5
BOUND = 2e-5  # of a tensor's norm
HALF_BOUND = 4 * torch.finfo(HALF).eps

CASES = {
    "as Mamba calls it": {},
    "bare": {"conv1d_bias": None, "D": None, "delta_bias": None, "delta_softplus": False},
    "biases": {"B_proj_bias": (DSTATE,), "C_proj_bias": (DSTATE,), "out_proj_bias": (OUT,), "checkpoint_lvl": 0},
    "norms": {"b_rms_weight": (DSTATE,), "c_rms_weight": (DSTATE,), "dt_rms_weight": (DIM,), "b_c_dt_rms_eps": 1e-2},
    "constant B": {"B": (DIM, DSTATE), "C_proj_bias": (DSTATE,), "c_rms_weight": (DSTATE,)},
    "constant C": {"C": (DIM, DSTATE), "B": (BATCH, 2, DSTATE, SEQLEN)},
    "constants": {"B": (DIM, DSTATE), "C": (DIM, DSTATE)},
    "given": {"B": (BATCH, DSTATE, SEQLEN), "C": (BATCH, DSTATE, SEQLEN), "b_rms_weight": (DSTATE,)},
    "given groups": {"B": (BATCH, 2, DSTATE, SEQLEN), "C": (BATCH, 2, DSTATE, SEQLEN), "c_rms_weight": (DSTATE,)},
    "given, with rows for both": {"B": (BATCH, DSTATE, SEQLEN), "x_proj_weight": (RANK + 2 * DSTATE, DIM)},
    "one token": {"xz": (BATCH, 2 * DIM, 1)},
}


def draw_arguments(**changed) -> dict:
    """Arguments with random tensors in fp32, those of these sizes or with these values."""
    rng = generator("cpu", "mamba_inner")
    rows = RANK + sum(changed.get(name) is None for name in ("B", "C")) * DSTATE
    sizes = {
        "xz": (BATCH, 2 * DIM, SEQLEN), "conv1d_weight": (DIM, 1, WIDTH), "conv1d_bias": (DIM,), "x_proj_weight": (rows, DIM),
        "delta_proj_weight": (DIM, RANK), "out_proj_weight": (OUT, DIM), "out_proj_bias": None, "A": (DIM, DSTATE), "D": (DIM,),
        "delta_bias": (DIM,), **changed,
    }
    given = {name: torch.randn(v, generator=rng) if isinstance(v, tuple) else v for name, v in sizes.items()}
    return given | {"A": -given["A"].exp()}


def normalize(t: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return t if weight is None else t / (t.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def definition(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None,
               C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
               b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6):
    """By the definitions of the convolution and of the scan."""
    def share_out(given, projected, bias, weight):
        """B or C: (batch, groups, dstate, seqlen), with a group for each channel where it does not vary with the token."""
        if given is not None and given.dim() == 2:
            return given[None, :, :, None].expand(len(xz), -1, -1, xz.shape[2])
        found = (projected if bias is None else projected + bias).mT if given is None else given
        return normalize((found if found.dim() == 4 else found[:, None]).mT, weight, b_c_dt_rms_eps).mT

    x, z = xz.chunk(2, 1)
    u = test_conv1d.definition(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    rows = u.mT @ x_proj_weight.T
    delta = normalize(rows[..., :RANK] @ delta_proj_weight.T, dt_rms_weight, b_c_dt_rms_eps).mT
    B = share_out(B, rows[..., RANK : RANK + DSTATE], B_proj_bias, b_rms_weight)
    C = share_out(C, rows[..., -DSTATE:], C_proj_bias, c_rms_weight)
    y, _ = test_selective_scan.definition(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def assert_right(given: dict, bound: float) -> None:
    assert_within(mamba_inner_fn, definition, given, ("out",), bound)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float64, 1e-12)], ids=("fp32", "fp64"))
def test_output_and_gradients(case, dtype, bound, device):
    assert_right(move(draw_arguments(**case), device, dtype), bound)


def test_the_projection_as_mamba_writes_it(device):
    """xz whose slowest axis is the channels; the parameters of a module in fp16, but for those it keeps in fp32."""
    given = move(draw_arguments(), device)
    given |= {name: t.to(HALF) for name, t in given.items() if isinstance(t, Tensor) and name not in ("A", "D", "delta_bias")}
    given["xz"] = given["xz"].transpose(0, 1).contiguous().transpose(0, 1)
    assert given["xz"].stride(2) == 1 and given["xz"].stride(0) == SEQLEN
    assert mamba_inner_fn(**given).dtype == HALF
    assert_right(given, HALF_BOUND)


@pytest.mark.parametrize("xz_dtype", [torch.float32, HALF], ids=str)
def test_autocast(xz_dtype, device):
    """It projects in its dtype, whatever xz has; what is no product stays in fp32, and so do the parameters' gradients."""
    given = move(draw_arguments(b_rms_weight=(DSTATE,), out_proj_bias=(OUT,)), device)
    given["xz"] = given["xz"].to(xz_dtype)
    with torch.autocast(device, HALF):
        assert mamba_inner_fn(**given).dtype == HALF
        assert_right(given, HALF_BOUND)


def test_bits_do_not_depend_on_the_layout(device):
    given = move(draw_arguments(), device)
    assert torch.equal(mamba_inner_fn(**given), mamba_inner_fn(**given | {"xz": given["xz"].mT.contiguous().mT}))


def test_no_copy_before_the_scan(device, monkeypatch):
    """delta, B and C come with tokens contiguous, as slices of the products they are."""
    seen = {}

    def scan(u, delta, A, B, C, *_):
        seen.update(u=u, delta=delta, B=B, C=C)
        return u

    monkeypatch.setattr("ssd.block.mamba_inner.selective_scan_fn", scan)
    mamba_inner_fn(**move(draw_arguments(), device))
    assert all(t.stride(2) == 1 for t in seen.values())
    assert seen["B"].untyped_storage().data_ptr() == seen["C"].untyped_storage().data_ptr()
    constant = draw_arguments(B=(DIM, DSTATE))
    mamba_inner_fn(**constant)
    assert seen["B"].shape == seen["C"].shape == (BATCH, DIM, DSTATE, SEQLEN)
    assert seen["B"].data_ptr() == constant["B"].data_ptr() and seen["C"].stride(1) == 0
