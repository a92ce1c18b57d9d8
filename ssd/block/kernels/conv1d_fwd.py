"""conv1d_fwd, docs/block.md, equations (C1) to (C3): out and final_states.

Reads x (batch, seqlen, dim), contiguous channels; weight (dim, width) and initial_states (batch, dim, width - 1), any strides;
bias (dim,) and seq_idx (batch, seqlen), contiguous. Writes out (batch, seqlen, dim) and final_states (batch, width - 1,
dim), both contiguous, in the dtype of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, strides
from ...runtime.launch import launch
from .conv1d import (
    BLOCK,
    Form,
    Strides,
    convolve,
    count_in_units,
    load_documents,
    load_filter,
    load_positions,
    load_rows,
    locate,
    pieces,
    sigmoid,
    visible,
)

_WARPS = 32  # programs that run side by side on an SM, as many as an SM takes
_LONGEST = 128  # tokens of a piece: longer ones fill rounds better and are slower


@triton.jit(do_not_specialize=COUNTS)
def conv1d_fwd_kernel(x, weight, bias, seq_idx, initial_states, out, final_states, strides, seqlen, npieces, tokens,
                      FORM: tl.constexpr):
    WIDTH: tl.constexpr = FORM.width
    STEP: tl.constexpr = FORM.step
    b, _, first, end, channels, in_dim = locate(npieces, tokens, seqlen, FORM)
    stride = tl.cast(strides.x[1], tl.int64) * FORM.unit
    x += b * strides.x[0] * FORM.unit
    if seq_idx is not None:
        seq_idx += b * seqlen
    if initial_states is not None:
        initial_states += b * strides.initial_states[0]
    weights, offset = load_filter(weight, strides.weight, bias, channels, in_dim, WIDTH)

    past = load_positions(x, stride, initial_states, strides.initial_states, first - (WIDTH - 1), channels, in_dim, WIDTH)
    out_row = out + (b * seqlen + first) * FORM.dim
    for token in tl.range(first, end, STEP, num_stages=FORM.stages):
        x_rows = load_rows(x + token * stride, stride, token, end, channels, in_dim, STEP)
        rows = past
        for r in tl.static_range(STEP):
            rows += (x_rows[r].to(tl.float32),)
        documents = load_documents(seq_idx, token - (WIDTH - 1), seqlen, WIDTH - 1 + STEP)
        for r in tl.static_range(STEP):
            y = convolve(visible(rows, documents, r, r + WIDTH - 1, WIDTH), weights, offset, WIDTH)
            if FORM.silu:
                y *= sigmoid(y)
            if seq_idx is not None:
                y = tl.where(documents[r + WIDTH - 1] >= 0, y, 0.0)
            tl.store(out_row + r * FORM.dim + channels, y.to(out.dtype.element_ty), mask=in_dim & (token + r < end))
        out_row += STEP * FORM.dim
        past = rows[STEP:]

    if final_states is not None:
        in_last = in_dim & (end == seqlen)
        last = load_positions(x, stride, initial_states, strides.initial_states, seqlen - (WIDTH - 1), channels, in_last, WIDTH)
        for i in tl.static_range(WIDTH - 1):
            at = (b * (WIDTH - 1) + i) * FORM.dim + channels
            tl.store(final_states + at, last[i].to(final_states.dtype.element_ty), mask=in_last)


def conv1d_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
               silu: bool, return_final_states: bool) -> tuple[Tensor, Tensor | None]:
    """Returns out (batch, dim, seqlen) and final_states (batch, dim, width - 1), None unless asked for: channels contiguous."""
    (batch, seqlen, dim), width = x.shape, weight.shape[1]

    def channels_last(tokens: int) -> Tensor:
        """No view of another tensor, which autograd would not let a caller change in place."""
        return torch.empty_strided((batch, dim, tokens), (tokens * dim, 1, dim), device=x.device, dtype=x.dtype)

    out, final_states = channels_last(seqlen), channels_last(width - 1) if return_final_states else None
    unit, (x_strides,) = count_in_units(x)
    tokens, npieces = pieces(x, _WARPS, _LONGEST)
    launch(
        conv1d_fwd_kernel, batch * npieces * cdiv(dim, BLOCK),
        x, weight, bias, seq_idx, initial_states, out, final_states,
        Strides(x_strides, weight.stride(), strides(initial_states)), seqlen, npieces, tokens, Form(unit, dim, width, silu),
        num_warps=1)
    return out, final_states
