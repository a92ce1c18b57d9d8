"""split_conv1d_scan: what follows a Mamba-2 block's input projection, in one call.

Causal convolution, SSD and gated RMSNorm, in one op where kernels run them, and the output projection. Autograd keeps the
convolved x, B and C and the SSD's output for the backward, which upstream computes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import ssd_chunk_scan, take_inputs, take_int
from ..autograd import encode
from ..registry import is_peer
from ..runtime import value_checks
from ..runtime.custom_ops import wants_gradient
from ..types import Options
from .arguments import check_size, takes_kernels
from .conv1d import causal_conv1d_fn, check_convolution
from .conv1d_scan_norm import Settings, conv1d_scan_norm, split_xBC
from .gated_norm import check_norm, rms_norm_gated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What the functions of the parts call their arguments, and this one its own.
_OF_CONVOLUTION = {"x": "zxbcdt", "weight": "conv1d_weight", "bias": "conv1d_bias", "initial_states": "conv_states",
                   "return_final_states": "return_conv_states"}
_OF_NORM = {"x": "zxbcdt", "z": "zxbcdt", "weight": "rmsnorm_weight", "eps": "rmsnorm_eps"}


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float | None = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    variant: str = "auto",
    options: Options | None = None,
    conv_states: Tensor | None = None,
    return_conv_states: bool = False,
    context_group: ProcessGroup | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Names, order and meaning are those of mamba_ssm's `mamba_split_conv1d_scan_combined`; from `variant` on they are ours.

    With dim = nheads * headdim and conv_dim = dim + 2 * ngroups * dstate:

    Args:
        zxbcdt: (batch, seqlen, 2 * d_mlp + dim + conv_dim + nheads), the projected input [z0 | x0 | z | x B C | dt]; d_mlp is
            what the other sizes leave. fp16, bf16 or fp32; on a CPU also fp64.
        conv1d_weight: (conv_dim, width); x, B and C are convolved along each document and activated.
        conv1d_bias: (conv_dim,) or None.
        dt_bias, A: (nheads,); the step is softplus(dt + dt_bias), clamped to dt_limit.
        D: (nheads,) or (nheads, headdim), which then gives headdim.
        initial_states: (batch, nheads, headdim, dstate), of the SSD.
        conv_states: (batch, conv_dim, width - 1), initial_states of `causal_conv1d_fn`; it starts from zeros unless given.
        return_conv_states: also return what conv_states must be to go on after the last token. Not with seq_idx.
        activation: "silu", "swish" (the same) or None, of the convolution.
        rmsnorm_weight: (dim,) or None: y is gated, y silu(z), without a norm, and rmsnorm_eps is not looked at.
        norm_before_gate: norm(y) silu(z), else norm(y silu(z)); groups of dim / ngroups channels are normed each by itself.
        outproj_weight: (out_dim, d_mlp + dim) or None: no projection. Under autocast, in its dtype.
        cu_seqlens: (ndocs + 1,), documents with states of their own, see `ssd.ssd_chunk_scan`: initial_states, conv_states and
            what is returned of both are (ndocs, ...). Not with context_group.
        chunk_size, seq_idx, state_dtype, variant, options, context_group: as in `ssd.ssd_chunk_scan`.

    Returns:
        out, (batch, seqlen, out_dim), the projection of [silu(z0) x0 | y]; a tuple of it and final_states
        (batch, nheads, headdim, dstate) fp32 (fp64 for fp64), if those were asked for; then of the convolution's states, if
        they were.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    nheads, headdim, ngroups, d_mlp = _find_sizes(zxbcdt, conv1d_weight, D, headdim, ngroups)
    _check_projection(outproj_weight, outproj_bias, d_mlp + nheads * headdim)
    dim, conv_dim = nheads * headdim, conv1d_weight.shape[0]
    z0, x0, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, dim, conv_dim, nheads], -1)

    has_states = initial_states is not None or conv_states is not None or return_final_states or return_conv_states
    if (rmsnorm_weight is not None and takes_kernels(zxbcdt) and context_group is None and not is_peer(variant)
            and not value_checks.ENABLED and (cu_seqlens is None or not has_states)):
        _call(check_convolution, _OF_CONVOLUTION, xBC.mT, conv1d_weight, conv1d_bias, seq_idx, conv_states, return_conv_states,
              None, activation, None, cu_seqlens)
        x, B, C = split_xBC(xBC, dim, headdim, ngroups)
        options, i = take_inputs(x, dt, A, B, C, chunk_size, D, None, dt_bias, initial_states, seq_idx, cu_seqlens, True,
                                 dt_limit, return_final_states, False, state_dtype, variant, options)
        _call(check_norm, _OF_NORM, z, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
        packed = zxbcdt[..., 2 * d_mlp :] if d_mlp else zxbcdt
        tensors = (packed, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, initial_states, conv_states,
                   i.seq_idx if seq_idx is None else seq_idx, i.seq_idx)
        out, final, conv_final = conv1d_scan_norm(tensors, Settings(
            activation is not None, return_conv_states, float(rmsnorm_eps), norm_before_gate, headdim, ngroups, i.chunk_size,
            *i.dt_limit, i.state_dtype, variant, encode(options), wants_gradient(tensors)))
        final_states, conv_states = [final] * return_final_states, [conv_final] * return_conv_states
    else:
        xBC, *conv_states = _make_tuple(_call(
            causal_conv1d_fn, _OF_CONVOLUTION, xBC.mT, conv1d_weight, conv1d_bias, seq_idx=seq_idx, initial_states=conv_states,
            return_final_states=return_conv_states, activation=activation, context_group=context_group, cu_seqlens=cu_seqlens))
        x, B, C = split_xBC(xBC.mT, dim, headdim, ngroups)
        gate_in_scan = z.unflatten(-1, (nheads, headdim)) if rmsnorm_weight is None else None
        y, *final_states = _make_tuple(ssd_chunk_scan(
            x, dt, A, B, C, chunk_size, D=D, z=gate_in_scan, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
            dt_softplus=True, dt_limit=dt_limit, return_final_states=return_final_states, state_dtype=state_dtype,
            variant=variant, options=options, context_group=context_group, cu_seqlens=cu_seqlens))
        out = y.flatten(2)
        if rmsnorm_weight is not None:
            out = _call(rms_norm_gated, _OF_NORM, out, rmsnorm_weight, z=z, eps=rmsnorm_eps, group_size=dim // ngroups,
                        norm_before_gate=norm_before_gate)
    if d_mlp:
        out = torch.cat([F.silu(z0) * x0, out], -1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, *final_states, *conv_states) if return_final_states or return_conv_states else out


def _find_sizes(zxbcdt: Tensor, conv1d_weight: Tensor, D: Tensor, headdim: int | None,
                ngroups: int) -> tuple[int, int, int, int]:
    """nheads, headdim, ngroups and d_mlp; what `ssd_chunk_scan` and the convolution can check themselves is left to them."""
    for name, t, dims in (("zxbcdt", zxbcdt, (3,)), ("conv1d_weight", conv1d_weight, (2,)), ("D", D, (1, 2))):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor")
        if t.dim() not in dims:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {' or '.join(map(str, dims))} dimensions")
    if D.dim() == 2:
        headdim = D.shape[1]
    elif headdim is None:
        raise ValueError("headdim: got None, expected it to be given with D of one dimension")
    headdim, ngroups = take_int("headdim", headdim), take_int("ngroups", ngroups)
    check_size("headdim", headdim)
    check_size("ngroups", ngroups)
    nheads, conv_dim = D.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    if conv_dim <= dim or (conv_dim - dim) % (2 * ngroups):
        raise ValueError(f"conv1d_weight: got {conv_dim} channels, expected {dim} for x and 2 * ngroups * dstate for B and C, "
                         f"ngroups = {ngroups}")
    rest = zxbcdt.shape[-1] - dim - conv_dim - nheads
    if rest < 0 or rest % 2:
        raise ValueError(f"zxbcdt: got {zxbcdt.shape[-1]} channels, expected {dim + conv_dim + nheads} for z, x, B, C and dt, "
                         "or more by an even number")
    return nheads, headdim, ngroups, rest // 2


def _check_projection(weight: Tensor | None, bias: Tensor | None, channels: int) -> None:
    if bias is not None and weight is None:
        raise ValueError("outproj_bias: got a tensor without outproj_weight, expected both or neither")
    for name, t in (("outproj_weight", weight), ("outproj_bias", bias)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected None or a tensor")
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != channels):
        raise ValueError(f"outproj_weight: got shape {tuple(weight.shape)}, expected (out_dim, {channels})")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"outproj_bias: got shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")


def _call(function: Callable, names: dict[str, str], *args, **more):
    """What the function gives; where it refuses an argument, by the name that this has here."""
    try:
        return function(*args, **more)
    except (TypeError, ValueError) as refused:
        name, _, why = str(refused).partition(":")
        if name not in names:
            raise
        raise type(refused)(f"{names[name]}:{why}") from None


def _make_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
