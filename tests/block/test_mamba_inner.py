"""mamba_inner_fn against one loop over tokens in fp64, in its output and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.block.mamba_inner import mamba_inner_fn
from tests.inputs import generator

BATCH, DIM, SEQLEN, DSTATE, RANK, WIDTH, OUT = 2, 4, 11, 3, 2, 4, 5
BOUND = 2e-5  # of a tensor's norm
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter gets bf16 wrong
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


def drawn(**changed) -> dict:
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


def normed(t: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return t if weight is None else t / (t.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def token_by_token(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None,
                   C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
                   b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6):
    def shared(given, projected, bias, weight, t):
        """B or C of a token, for each channel: [batch, dim, dstate]."""
        if given is None:
            found = normed(projected if bias is None else projected + bias, weight, b_c_dt_rms_eps)[:, None]
        elif given.dim() == 2:
            return given.expand(len(xz), -1, -1)
        else:
            found = normed((given if given.dim() == 4 else given[:, None])[..., t], weight, b_c_dt_rms_eps)
        return found.repeat_interleave(DIM // found.shape[1], 1)

    x, z = xz[:, :DIM], xz[:, DIM:]
    padded = F.pad(x, (WIDTH - 1, 0))
    state, outs = x.new_zeros(len(x), DIM, DSTATE), []
    for t in range(x.shape[2]):
        u = (padded[:, :, t : t + WIDTH] * conv1d_weight[:, 0]).sum(-1)
        u = F.silu(u if conv1d_bias is None else u + conv1d_bias)
        row = u @ x_proj_weight.T
        delta = normed(row[:, :RANK] @ delta_proj_weight.T, dt_rms_weight, b_c_dt_rms_eps)
        delta = delta if delta_bias is None else delta + delta_bias
        delta = F.softplus(delta) if delta_softplus else delta
        B_t = shared(B, row[:, RANK : RANK + DSTATE], B_proj_bias, b_rms_weight, t)
        C_t = shared(C, row[:, -DSTATE:], C_proj_bias, c_rms_weight, t)
        state = (delta[..., None] * A).exp() * state + (delta * u)[..., None] * B_t
        y = (state * C_t).sum(-1) + (0 if D is None else D * u)
        outs.append((y * F.silu(z[:, :, t])) @ out_proj_weight.T + (0 if out_proj_bias is None else out_proj_bias))
    return torch.stack(outs, 1)


def leaves(given: dict, dtype: torch.dtype, device: str) -> dict:
    return {name: v.detach().to(device, dtype).requires_grad_() if isinstance(v, Tensor) else v for name, v in given.items()}


def tensors(given: dict) -> dict[str, Tensor]:
    return {name: v for name, v in given.items() if isinstance(v, Tensor)}


def assert_equal(ours: dict, bound: float, device: str) -> None:
    """The function and the loop in fp64, in their outputs and the gradients of `ours`, which are leaves."""
    truth = leaves(ours, torch.float64, device)
    got, expected = mamba_inner_fn(**ours), token_by_token(**truth)
    way = torch.randn(expected.shape, generator=generator("cpu", "way")).to(expected)
    got.backward(way.to(got.dtype))
    expected.backward(way)
    assert got.shape == expected.shape and (got - expected).norm() <= bound * expected.norm()
    for name, t in tensors(ours).items():
        assert t.grad.dtype == t.dtype
        assert (t.grad - truth[name].grad).norm() <= bound * truth[name].grad.norm(), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float64, 1e-12)], ids=("fp32", "fp64"))
def test_output_and_gradients(case, dtype, bound, device):
    assert_equal(leaves(drawn(**case), dtype, device), bound, device)


def test_the_projection_as_mamba_writes_it(device):
    """xz whose slowest axis is the channels; the parameters of a module in fp16, but for those it keeps in fp32."""
    given = {name: t.to(HALF) if name not in ("A", "D", "delta_bias") else t for name, t in tensors(drawn()).items()}
    given["xz"] = given["xz"].transpose(0, 1).contiguous().transpose(0, 1)
    ours = {name: t.detach().to(device).requires_grad_() for name, t in given.items()}
    assert ours["xz"].stride(2) == 1 and ours["xz"].stride(0) == SEQLEN
    assert mamba_inner_fn(**ours, out_proj_bias=None).dtype == HALF
    assert_equal({**ours, "out_proj_bias": None}, HALF_BOUND, device)


@pytest.mark.parametrize("xz_dtype", [torch.float32, HALF], ids=str)
def test_autocast(xz_dtype, device):
    """It projects in its dtype, whatever xz has; what is no product stays in fp32, and so do the parameters' gradients."""
    ours = leaves(drawn(b_rms_weight=(DSTATE,), out_proj_bias=(OUT,)), torch.float32, device)
    ours["xz"] = ours["xz"].detach().to(xz_dtype).requires_grad_()
    with torch.autocast(device, HALF):
        assert mamba_inner_fn(**ours).dtype == HALF
        assert_equal(ours, HALF_BOUND, device)


def test_bits_do_not_depend_on_the_layout(device):
    ours = {name: t.to(device) for name, t in tensors(drawn()).items()}
    xz = ours["xz"].mT.contiguous().mT
    assert torch.equal(mamba_inner_fn(**ours, out_proj_bias=None), mamba_inner_fn(**ours | {"xz": xz}, out_proj_bias=None))


def test_no_copy_before_the_scan(device, monkeypatch):
    """delta, B and C come with tokens contiguous, as slices of the products they are."""
    seen = {}

    def scan(u, delta, A, B, C, *_):
        seen.update(u=u, delta=delta, B=B, C=C)
        return u

    monkeypatch.setattr("ssd.block.mamba_inner.selective_scan_fn", scan)
    mamba_inner_fn(**{name: t.to(device) for name, t in tensors(drawn()).items()}, out_proj_bias=None)
    assert all(t.stride(2) == 1 for t in seen.values())
    assert seen["B"].untyped_storage().data_ptr() == seen["C"].untyped_storage().data_ptr()
    constant = tensors(drawn(B=(DIM, DSTATE)))
    mamba_inner_fn(**constant, out_proj_bias=None)
    assert seen["B"].shape == seen["C"].shape == (BATCH, DIM, DSTATE, SEQLEN)
    assert seen["B"].data_ptr() == constant["B"].data_ptr() and seen["C"].stride(1) == 0


DIMS = (DIM, DSTATE)
BAD = {
    "no tensor": ({"xz": None}, TypeError, r"xz: got NoneType, expected a tensor \(batch, 2 \* dim, seqlen\)"),
    "odd": ({"xz": torch.zeros(2, 7, 11)}, ValueError, r"xz: got 7 channels, expected 2 \* dim, an even number"),
    "A": ({"A": torch.zeros(5, 3)}, ValueError, r"A: got shape \(5, 3\), expected \(4, 3\) to go with xz"),
    "filter": ({"conv1d_weight": torch.zeros(4, 4)}, ValueError, r"conv1d_weight: got .* expected \(dim, 1, width\)"),
    "rows": ({"x_proj_weight": torch.zeros(9, 4)}, ValueError, r"x_proj_weight: got shape \(9, 4\), expected \(8, 4\)"),
    "dtype": ({"x_proj_weight": torch.zeros(8, 4).half()}, TypeError, "x_proj_weight: got .*float16, expected .*float32"),
    "delta": ({"delta_proj_weight": torch.zeros(3, 2)}, ValueError, r"delta_proj_weight: got .* expected \(4, 2\)"),
    "out": ({"out_proj_weight": torch.zeros(5, 3)}, ValueError, r"out_proj_weight: got shape \(5, 3\), expected \(5, 4\)"),
    "D": ({"D": torch.zeros(4, 1)}, ValueError, r"D: got shape \(4, 1\)"),
    "B": ({"B": torch.zeros(3)}, ValueError, r"B: got shape \(3,\), expected None, \(4, 3\), \(batch, dstate, seqlen\)"),
    "given": ({"B": torch.zeros(2, 3, 10)}, ValueError, r"B: got shape \(2, 1, 3, 10\), expected \(2, 1, 3, 11\)"),
    "bias": ({"C": torch.zeros(DIMS), "C_proj_bias": torch.zeros(3)}, ValueError, "C_proj_bias: got a tensor beside C"),
    "level": ({"checkpoint_lvl": 2}, ValueError, "checkpoint_lvl: got 2, expected 0 or 1"),
}


@pytest.mark.parametrize("changed, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(changed, error, message):
    with pytest.raises(error, match=message):
        mamba_inner_fn(**drawn() | changed)
