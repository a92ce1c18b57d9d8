"""mamba_inner_fn: what follows a Mamba-1 block's input projection, in one call.

A composition: causal convolution, projections of delta, B and C, selective scan, output projection. Autograd keeps what comes
between them for the backward; upstream computes part of that again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import DTYPES, check_dtype, check_tensor
from .conv1d import causal_conv1d_fn
from .gated_norm import rms_norm_gated
from .selective_scan import selective_scan_fn

_AXES = {
    "xz": "batch, 2 * dim, seqlen",
    "conv1d_weight": "dim, 1, width",
    "x_proj_weight": "rank + 2 * dstate, dim",
    "delta_proj_weight": "dim, rank",
    "out_proj_weight": "out_dim, dim",
    "A": "dim, dstate",
}
_OPTIONAL = {
    "conv1d_bias": "dim", "out_proj_bias": "out_dim", "D": "dim", "delta_bias": "dim", "B_proj_bias": "dstate",
    "C_proj_bias": "dstate", "b_rms_weight": "dstate", "c_rms_weight": "dstate", "dt_rms_weight": "dim",
}
_PROJECTIONS = ("x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias")


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Names, order and meaning are those of mamba_ssm's function (mamba_ssm/ops/selective_scan_interface.py), for real A.

    Differentiable in every tensor, the weights of the norms included, which upstream gives no gradient.

    Args:
        xz: (batch, 2 * dim, seqlen), the projected input [x | z]. fp16, bf16, fp32 or fp64; fast where tokens are contiguous.
        conv1d_weight, conv1d_bias: (dim, 1, width), width 2 to 4, and (dim,) or None; x is convolved and activated by SiLU.
        x_proj_weight: (rank + 2 * dstate, dim), of delta before its own projection, B and C; the rows of a B or C that is given
            are not looked at and, all of them, may be absent. In the dtype of xz, as are the other two projections and
            out_proj_bias; any floating dtype under autocast, which projects in its own.
        delta_proj_weight: (dim, rank).
        out_proj_weight, out_proj_bias: (out_dim, dim), and (out_dim,) or None.
        A, D, delta_bias, delta_softplus: as in `selective_scan_fn`; any floating dtype, here and below.
        B, C: None, to be projected from x; else as in `selective_scan_fn`, or (dim, dstate) for what no token changes, which
            takes the time of dim groups, and in the backward their memory.
        B_proj_bias, C_proj_bias: (dstate,), added to a projected B or C.
        b_rms_weight, c_rms_weight: (dstate,), of an RMSNorm of B or C, which then varies with the token; None: no norm.
        dt_rms_weight: (dim,), of one of the projected delta.
        b_c_dt_rms_eps: what the norms add to the mean square.
        checkpoint_lvl: 0 or 1, of no effect: upstream's choice of what to compute again.

    Returns:
        (batch, seqlen, out_dim), in the dtype of xz, or autocast's.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    tensors = {
        "xz": xz, "conv1d_weight": conv1d_weight, "conv1d_bias": conv1d_bias, "x_proj_weight": x_proj_weight,
        "delta_proj_weight": delta_proj_weight, "out_proj_weight": out_proj_weight, "out_proj_bias": out_proj_bias, "A": A,
        "D": D, "delta_bias": delta_bias, "B_proj_bias": B_proj_bias, "C_proj_bias": C_proj_bias, "b_rms_weight": b_rms_weight,
        "c_rms_weight": c_rms_weight, "dt_rms_weight": dt_rms_weight,
    }
    batch, dim, seqlen, rank, dstate = _check(tensors, (B is None) + (C is None))
    _check_given("B", B, B_proj_bias, b_rms_weight, A, xz)
    _check_given("C", C, C_proj_bias, c_rms_weight, A, xz)
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl: got {checkpoint_lvl!r}, expected 0 or 1")

    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")

    def split_sequences(t: Tensor) -> Tensor:
        """[features, batch * seqlen] as (batch, features, seqlen), in place: tokens stay contiguous, for the scan."""
        return t.unflatten(1, (batch, seqlen)).transpose(0, 1)

    def normalize(t: Tensor, weight: Tensor | None) -> Tensor:
        return t if weight is None else rms_norm_gated(t.mT, weight, eps=b_c_dt_rms_eps).mT.contiguous()

    x_dbl = x_proj_weight @ x.transpose(0, 1).flatten(1)  # [dim, batch * seqlen], a view of what the convolution wrote
    delta = normalize(split_sequences(delta_proj_weight @ x_dbl[:rank]), dt_rms_weight)
    if B is None:
        B = split_sequences(_add_bias(x_dbl[rank : rank + dstate], B_proj_bias))
    if C is None:
        C = split_sequences(_add_bias(x_dbl[-dstate:], C_proj_bias))
    B, C = normalize(B, b_rms_weight), normalize(C, c_rms_weight)
    if 2 in (B.dim(), C.dim()):
        B, C = (_expand_to_channels(t, batch, dim, seqlen) for t in (B, C))
    y = selective_scan_fn(x.contiguous(), delta, A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def _add_bias(t: Tensor, bias: Tensor | None) -> Tensor:
    return t if bias is None else t + bias.to(t.dtype)[:, None]


def _expand_to_channels(t: Tensor, batch: int, dim: int, seqlen: int) -> Tensor:
    """B or C as (batch, dim, dstate, seqlen): dim groups of one channel, a view where there was one group or none."""
    if t.dim() == 2:
        return t[None, :, :, None].expand(batch, -1, -1, seqlen)
    t = t if t.dim() == 4 else t.unsqueeze(1)
    return t.unsqueeze(2).expand(-1, -1, dim // t.shape[1], -1, -1).flatten(1, 2)


def _check(tensors: dict[str, Tensor | None], projected: int) -> tuple[int, int, int, int, int]:
    """batch, dim, seqlen, rank and dstate, which every tensor goes with. projected: how many of B and C x_proj_weight gives."""
    for name, axes in _AXES.items():
        t = tensors[name]
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor ({axes})")
        if t.dim() != axes.count(",") + 1 or not t.numel():
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected ({axes}), no size 0")
    xz, A = tensors["xz"], tensors["A"]
    check_dtype("xz", xz)
    if A.is_complex():
        raise TypeError(f"A: got {A.dtype}, expected a real dtype")
    batch, channels, seqlen = xz.shape
    if channels % 2:
        raise ValueError(f"xz: got {channels} channels, expected 2 * dim, an even number, for x and z")
    dim, rank, dstate = channels // 2, tensors["delta_proj_weight"].shape[1], A.shape[1]
    every_row = rank + 2 * dstate
    sizes = {
        "batch": batch, "2 * dim": channels, "seqlen": seqlen, "dim": dim, "1": 1, "width": tensors["conv1d_weight"].shape[2],
        "rank + 2 * dstate": every_row if len(tensors["x_proj_weight"]) == every_row else rank + projected * dstate,
        "rank": rank, "dstate": dstate, "out_dim": len(tensors["out_proj_weight"]),
    }
    of_projections = DTYPES if torch.is_autocast_enabled(xz.device.type) else (xz.dtype,)
    for name, axes in (_AXES | _OPTIONAL).items():
        if tensors[name] is not None:
            dtypes = of_projections if name in _PROJECTIONS else DTYPES
            check_tensor(name, tensors[name], tuple(sizes[axis] for axis in axes.split(", ")), xz, dtypes, beside="xz")
    return batch, dim, seqlen, rank, dstate


def _check_given(name: str, t: Tensor | None, bias: Tensor | None, rms_weight: Tensor | None, A: Tensor, xz: Tensor) -> None:
    """B or C with what belongs to it; the shape of one that varies with the token is left to the scan."""
    if t is None:
        return
    constant = tuple(A.shape)
    accepted = f"None, {constant}, (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen)"
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected {accepted}")
    if t.dim() not in (2, 3, 4):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {accepted}")
    if bias is not None:
        raise ValueError(f"{name}_proj_bias: got a tensor beside {name}, expected None: it is added to a projected {name}")
    if t.dim() == 2:
        check_tensor(name, t, constant, xz, beside="xz")
        if rms_weight is not None:
            raise ValueError(f"{name.lower()}_rms_weight: got a tensor beside {name} of shape {constant}, expected None, or "
                             f"{name} to vary with the token")
