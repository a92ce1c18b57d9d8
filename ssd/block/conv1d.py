"""The causal depthwise convolution in front of a Mamba block's scan, with SiLU.

Names, order and meaning are those of the `causal_conv1d` package's `causal_conv1d_fn`; one token at a time is in
`conv1d_update.py`. What the package's documentation leaves open is as its releases 1.6 and 1.7 do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..documents import check_bounds, number_documents, place_states
from ..kernels.arguments import contiguous
from ..runtime.custom_ops import DifferentiableOp
from .arguments import check_apart, check_tensor, takes_kernels
from .kernels.conv1d_bwd import conv1d_bwd
from .kernels.conv1d_fwd import conv1d_fwd

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WIDTHS = (2, 3, 4)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    context_group: ProcessGroup | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each channel convolved along its tokens, then SiLU (docs/block.md, equations C1 to C8).

    Differentiable in x, weight, bias and initial_states, through out and final_states; gradients are the same bits in every run
    on one kind of GPU. All arithmetic is fp32 (fp64 for fp64 x). CPU tensors and fp64 take the torch form; with
    TRITON_INTERPRET=1, CPU tensors take the interpreted kernels.

    Args:
        x: (batch, dim, seqlen), fp16, bf16, fp32 or fp64. Read in place where channels are contiguous, as in a transposed
            (batch, seqlen, channels) or a slice of one; any other layout is copied to that one first.
        weight: (dim, width), width 2 to 4; weight[:, -1] multiplies the token itself. Any floating dtype, here and below.
        bias: (dim,).
        seq_idx: (batch, seqlen) int32 or int64, the document of each token. A token sees the tokens of its own document alone,
            and a negative number marks padding, whose output is 0 and which, where it is finite, has no gradient.
        initial_states: (batch, dim, width - 1), what came before the first token, the oldest first; zeros unless given. With
            seq_idx they belong to the document of the row's first token, whatever its number.
        return_final_states: also return what initial_states must be to go on after the last token. Not with seq_idx, as
            upstream: it has no document to go on with where a row ends in padding.
        final_states_out: (batch, dim, width - 1), where final_states are written and which is returned for them. Not looked at
            unless they are asked for.
        activation: None, "silu" or "swish", which is the same.
        cu_seqlens: (ndocs + 1,) integers from 0 to seqlen, batch 1, as in `ssd.ssd_chunk_scan`: each document has states of its
            own, and initial_states, final_states_out and final_states are (ndocs, dim, width - 1); the first are rounded to
            the dtype of x. Not with seq_idx or context_group.
        context_group: the ranks that a sequence is cut over, each of which passes its own tokens (docs/context-parallel.md).

    Returns:
        out, shape and dtype of x, channels contiguous; a tuple of it and final_states (batch, dim, width - 1), in the dtype of
        x with contiguous channels, if those were asked for.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    check_convolution(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation,
                      context_group, cu_seqlens)
    if cu_seqlens is not None and initial_states is None and not return_final_states:
        seq_idx = number_documents(None, cu_seqlens, x.shape[2])
    elif cu_seqlens is not None:
        out, final_states = _convolve_documents(x, weight, bias, initial_states, cu_seqlens, activation)
        if not return_final_states:
            return out
        return out, final_states if final_states_out is None else final_states_out.copy_(final_states)
    if context_group is not None:
        from ..distributed import find_convolution_start  # here, so that others do not import torch.distributed

        x, initial_states = find_convolution_start(x, weight, bias, seq_idx, initial_states, activation, context_group)
    tensors = (x, weight, bias, seq_idx, initial_states)
    settings = (activation is not None, return_final_states)
    if not takes_kernels(x):
        out, final_states = compute_in_torch(*tensors, *settings)
    else:
        out, final_states = _CAUSAL_CONV1D(tensors, settings)
    if not return_final_states:
        return out
    return out, final_states if final_states_out is None else final_states_out.copy_(final_states)


def _convolve_documents(x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor,
                        activation: str | None) -> tuple[Tensor, Tensor]:
    """out and final_states. The state of each document is put before its tokens, so that they see nothing else before them."""
    (_, dim, seqlen), held, ndocs = x.shape, weight.shape[1] - 1, cu_seqlens.shape[0] - 1
    state, token, last = place_states(cu_seqlens, seqlen, held)
    if initial_states is None:
        initial_states = x.new_zeros(ndocs, dim, held)
    rows = torch.cat([initial_states.mT.flatten(0, 1).to(x.dtype), x[0].mT])  # [tokens, dim]
    rows = torch.empty_like(rows).index_copy(0, torch.cat([state, token]), rows)
    out = causal_conv1d_fn(rows.mT[None], weight, bias, activation=activation)
    return out.mT.index_select(1, token).mT, rows.index_select(0, last).unflatten(0, (ndocs, held)).mT


def compute_in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
                     silu: bool, return_final_states: bool = False) -> tuple[Tensor, Tensor | None]:
    """(C1) to (C3) in torch with the kernels' rounding points, differentiable: fp32 (fp64 for fp64) up to the results."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    (batch, dim, seqlen), width = x.shape, weight.shape[1]
    if initial_states is None:
        initial_states = x.new_zeros(batch, dim, width - 1)
    positions = torch.cat([initial_states.mT.to(compute), x.mT.to(compute)], 1)  # [b, width - 1 + l, d]
    if seq_idx is not None:
        documents = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)[..., None]
    out = torch.zeros((), dtype=compute, device=x.device) if bias is None else bias.to(compute)
    for i in range(width):
        tap = positions[:, i : i + seqlen]
        if seq_idx is not None:
            tap = tap.where(documents[:, i : i + seqlen] == seq_idx[..., None], 0)
        out = out + weight[:, i].to(compute) * tap
    if silu:
        out = out * out.sigmoid()
    if seq_idx is not None:
        out = out.where(seq_idx[..., None] >= 0, 0)
    return out.to(x.dtype).mT, positions[:, seqlen:].to(x.dtype).contiguous().mT if return_final_states else None


def check_convolution(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation,
                      context_group, cu_seqlens) -> None:
    """Checks of the arguments of `causal_conv1d_fn`."""
    check_filter(x, weight, bias, activation, "(batch, dim, seqlen)")
    if cu_seqlens is not None:
        _check_documents(x, cu_seqlens, seq_idx, context_group)
    nstates = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_states(x, weight, seq_idx, initial_states, return_final_states, final_states_out, nstates)


def check_filter(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, layout: str) -> None:
    """Checks of what both functions take. layout: the axes of x, of which the second is dim."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, expected a tensor {layout}")
    if x.dim() != layout.count(",") + 1 or not x.numel():
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected {layout}, no size 0")
    check_tensor("x", x, tuple(x.shape), x)
    dim = x.shape[1]
    width = weight.shape[1] if isinstance(weight, Tensor) and weight.dim() == 2 else WIDTHS[-1]
    if width not in WIDTHS:
        raise ValueError(f"weight: got a width of {width}, shape {tuple(weight.shape)}, expected 2, 3 or 4")
    check_tensor("weight", weight, (dim, width), x)
    if bias is not None:
        check_tensor("bias", bias, (dim,), x)
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation: got {activation!r}, expected None, 'silu' or 'swish'")


def _check_documents(x, cu_seqlens, seq_idx, context_group) -> None:
    for name, other in (("seq_idx", seq_idx), ("context_group", context_group)):
        if other is not None:
            raise ValueError(f"cu_seqlens: got a tensor with {name}, expected one of the two")
    check_bounds(cu_seqlens, x, x.shape[2])


def _check_states(x, weight, seq_idx, initial_states, return_final_states, final_states_out, nstates) -> None:
    batch, dim, seqlen = x.shape
    states = (nstates, dim, weight.shape[1] - 1)
    if not isinstance(return_final_states, bool):
        raise TypeError(f"return_final_states: got {return_final_states!r}, expected True or False")
    if seq_idx is not None:
        check_tensor("seq_idx", seq_idx, (batch, seqlen), x, (torch.int32, torch.int64))
        if return_final_states:
            raise ValueError("return_final_states: got True with seq_idx, expected False, or a row of one document without it")
    if initial_states is not None:
        check_tensor("initial_states", initial_states, states, x)
    if return_final_states and final_states_out is not None:
        check_tensor("final_states_out", final_states_out, states, x)
        check_apart("final_states_out", final_states_out)


def _make_channels_last(t: Tensor) -> Tensor:
    """(batch, dim, seqlen) as (batch, seqlen, dim) with contiguous channels: the same memory where it is laid out so."""
    t = t.mT
    return t if t.stride(2) == 1 else t.contiguous()


def _forward(x, weight, bias, seq_idx, initial_states, silu, return_final_states) -> tuple[Tensor, Tensor | None]:
    with torch.cuda.device_of(x):
        return conv1d_fwd(_make_channels_last(x), weight, contiguous(bias), contiguous(seq_idx), initial_states, silu,
                          return_final_states)


def _forward_fake(x, weight, bias, seq_idx, initial_states, silu, return_final_states):
    (batch, dim, seqlen), width = x.shape, weight.shape[1]
    final_states = x.new_empty(batch, width - 1, dim).mT if return_final_states else x.new_empty(0)
    return x.new_empty(batch, seqlen, dim).mT, final_states


def _backward(x, weight, bias, seq_idx, initial_states, dout, dfinal_states, silu, _) -> tuple[Tensor | None, ...]:
    dout = torch.zeros_like(x) if dout is None else dout
    with torch.cuda.device_of(x):
        dx, dweight, dbias, dinitial_states = conv1d_bwd(
            _make_channels_last(x), weight, contiguous(bias), contiguous(seq_idx), initial_states, silu,
            _make_channels_last(dout), dfinal_states)
    return dx.mT, dweight, dbias, None, None if dinitial_states is None else dinitial_states.mT


def _backward_fake(x, weight, bias, seq_idx, initial_states) -> tuple[Tensor | None, ...]:
    dx, dinitial_states = (None if t is None else t.new_empty(t.mT.shape).mT for t in (x, initial_states))
    return dx, weight.new_empty(weight.shape), None if bias is None else bias.new_empty(bias.shape), None, dinitial_states


_CAUSAL_CONV1D = DifferentiableOp(
    "causal_conv1d", "Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states",
    "bool silu, bool return_final_states", outputs=("out", "final_states"), forward=_forward, fake=_forward_fake,
    backward=_backward, fake_backward=_backward_fake)
