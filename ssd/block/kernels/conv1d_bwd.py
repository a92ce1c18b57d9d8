"""conv1d_bwd, docs/block.md, equations (C4) to (C8): every gradient in one walk, which computes (C1) again.

Reads what conv1d_fwd reads; dout (batch, seqlen, dim), contiguous channels; dfinal_states (batch, dim, width - 1), any strides.
Writes dx (batch, seqlen, dim) in the dtype of x, contiguous channels, and dinitial_states (batch, width - 1, dim) in that of
initial_states, contiguous; and of each piece its part of dbias and dweight, (pieces, 1 + width, dim) fp32.
conv1d_filter_grads adds these up in fixed order: dweight (dim, width), contiguous, in the dtype of weight, and dbias (dim,) in
that of bias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, strides
from ...kernels.sum_parts import add_parts, tile
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

_WARPS = 16  # programs that run side by side on an SM, by their registers


@triton.jit
def pre_grads(rows, documents, dout, weights, offset, WIDTH: tl.constexpr, SILU: tl.constexpr, STEP: tl.constexpr):
    """(C4): the gradients of STEP tokens before their activation."""
    dpre = ()
    for r in tl.static_range(STEP):
        d = dout[r].to(tl.float32)
        if SILU:
            pre = convolve(visible(rows, documents, r, r + WIDTH - 1, WIDTH), weights, offset, WIDTH)
            s = sigmoid(pre)
            d *= s
            d += d * (pre - pre * s)
        if len(documents) > 0:
            d = tl.where(documents[r + WIDTH - 1] >= 0, d, 0.0)
        dpre += (d,)
    return dpre


@triton.jit
def add_filter_grads(sums, rows, documents, dpre, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """(C8), (C7): the sums, that of dbias first, with STEP more tokens in them."""
    for r in tl.static_range(STEP):
        taps = visible(rows, documents, r, r + WIDTH - 1, WIDTH)
        added = (sums[0] + dpre[r],)
        for i in tl.static_range(WIDTH):
            added += (sums[i + 1] + dpre[r] * taps[i],)
        sums = added
    return sums


@triton.jit
def store_position_grads(dpre, documents, position, first, end, weights, dfinal_states, dfinal_strides, dx_row, dx_stride,
                         dinitial_states, seqlen, channels, in_dim, DIM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """(C5), (C6) for STEP positions, from the tokens that see them. Tokens before `first` are another program's."""
    for r in tl.static_range(STEP):
        p = tl.cast(position + r, tl.int64)
        taps = visible(dpre, documents, r, r, WIDTH)
        grad = tl.zeros([channels.shape[0]], tl.float32)
        for i in tl.static_range(WIDTH):
            grad += weights[WIDTH - 1 - i] * taps[i]
        if dfinal_states is not None:
            kept = p - (seqlen - (WIDTH - 1))
            at = channels.to(tl.int64) * dfinal_strides[1] + kept * dfinal_strides[2]
            grad += tl.load(dfinal_states + at, mask=in_dim & (kept >= 0) & (p < seqlen), other=0.0).to(tl.float32)
        tl.store(dx_row + r * dx_stride + channels, grad.to(dx_row.dtype.element_ty), mask=in_dim & (p >= first) & (p < end))
        if dinitial_states is not None:
            at = (p + WIDTH - 1) * DIM + channels
            tl.store(dinitial_states + at, grad.to(dinitial_states.dtype.element_ty), mask=in_dim & (p < 0))


# strides behind what is read: behind all tensors, ptxas takes up to 8 registers more on sm_80
@triton.jit(do_not_specialize=COUNTS)
def conv1d_bwd_kernel(x, dout, weight, bias, seq_idx, initial_states, dfinal_states, strides, dx, dinitial_states, parts,
                      seqlen, npieces, tokens, FORM: tl.constexpr):
    WIDTH: tl.constexpr = FORM.width
    STEP: tl.constexpr = FORM.step
    b, piece, first, end, channels, in_dim = locate(npieces, tokens, seqlen, FORM)
    x_stride, dout_stride = tl.cast(strides.x[1], tl.int64) * FORM.unit, tl.cast(strides.dout[1], tl.int64) * FORM.unit
    x += b * strides.x[0] * FORM.unit
    if seq_idx is not None:
        seq_idx += b * seqlen
    if initial_states is not None:
        initial_states += b * strides.initial_states[0]
        dinitial_states += b * (WIDTH - 1) * FORM.dim
    if dfinal_states is not None:
        dfinal_states += b * strides.dfinal_states[0]
    weights, offset = load_filter(weight, strides.weight, bias, channels, in_dim, WIDTH)

    past = load_positions(x, x_stride, initial_states, strides.initial_states, first - (WIDTH - 1), channels, in_dim, WIDTH)
    late, sums = (), ()
    for _ in tl.static_range(WIDTH - 1):
        late += (tl.zeros(channels.shape, tl.float32),)
    for _ in tl.static_range(WIDTH + 1):
        sums += (tl.zeros(channels.shape, tl.float32),)
    dout += b * strides.dout[0] * FORM.unit
    dx_stride = tl.cast(strides.dx[1], tl.int64) * FORM.dx_unit
    dx_row = dx + b * strides.dx[0] * FORM.dx_unit + (first - (WIDTH - 1)) * dx_stride
    # one step more than the piece has: its last width - 1 tokens are seen by those after it
    for token in tl.range(first, end + STEP, STEP, num_stages=FORM.stages):
        x_rows = load_rows(x + token * x_stride, x_stride, token, seqlen, channels, in_dim, STEP)
        dout_rows = load_rows(dout + token * dout_stride, dout_stride, token, seqlen, channels, in_dim, STEP)
        rows = past
        for r in tl.static_range(STEP):
            rows += (x_rows[r].to(tl.float32),)
        documents = load_documents(seq_idx, token - (WIDTH - 1), seqlen, WIDTH - 1 + STEP)
        dpre = pre_grads(rows, documents, dout_rows, weights, offset, WIDTH, FORM.silu, STEP)
        if token < end:
            sums = add_filter_grads(sums, rows, documents, dpre, WIDTH, STEP)
        dpre = late + dpre
        store_position_grads(dpre, documents, token - (WIDTH - 1), first, end, weights, dfinal_states, strides.dfinal_states,
                             dx_row, dx_stride, dinitial_states, seqlen, channels, in_dim, FORM.dim, WIDTH, STEP)
        dx_row += STEP * dx_stride
        past, late = rows[STEP:], dpre[STEP:]

    for i in tl.static_range(WIDTH + 1):
        at = (tl.cast(piece, tl.int64) * (WIDTH + 1) + i) * FORM.dim + channels
        tl.store(parts + at, sums[i], mask=in_dim)


@triton.jit(do_not_specialize=COUNTS)
def conv1d_filter_grads_kernel(parts, dweight, dbias, npieces, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                               COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = add_parts(parts, columns, npieces, (WIDTH + 1) * DIM, ROWS, COLUMNS)
    row, channel = columns // DIM, columns % DIM
    at = channel * WIDTH + row - 1
    tl.store(dweight + at, total.to(dweight.dtype.element_ty), mask=(row >= 1) & (row <= WIDTH))
    if dbias is not None:
        tl.store(dbias + channel, total.to(dbias.dtype.element_ty), mask=row == 0)


def conv1d_bwd(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
               silu: bool, dout: Tensor, dfinal_states: Tensor | None,
               into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns dx, dweight, dbias (None without bias) and dinitial_states (None without initial_states).

    into: where dx is to lie.
    """
    (batch, seqlen, dim), width = x.shape, weight.shape[1]
    dx = torch.empty(batch, seqlen, dim, device=x.device, dtype=x.dtype) if into is None else into
    dinitial_states = None
    if initial_states is not None:
        dinitial_states = torch.empty(batch, width - 1, dim, device=x.device, dtype=initial_states.dtype)
    unit, (x_strides, dout_strides) = count_in_units(x, dout)
    dx_unit, (dx_strides,) = count_in_units(dx)
    tokens, npieces = pieces(x, _WARPS)
    parts = torch.empty(batch * npieces, width + 1, dim, device=x.device, dtype=torch.float32)
    launch(
        conv1d_bwd_kernel, batch * npieces * cdiv(dim, BLOCK),
        x, dout, weight, bias, seq_idx, initial_states, dfinal_states,
        Strides(x_strides, weight.stride(), strides(initial_states), dout_strides, strides(dfinal_states), dx_strides), dx,
        dinitial_states, parts, seqlen, npieces, tokens, Form(unit, dim, width, silu, dx_unit), num_warps=1)
    dweight = torch.empty(dim, width, device=x.device, dtype=weight.dtype)
    dbias = None if bias is None else torch.empty(dim, device=x.device, dtype=bias.dtype)
    rows, columns = tile(batch * npieces, (width + 1) * dim)
    launch(
        conv1d_filter_grads_kernel, cdiv((width + 1) * dim, columns),
        parts, dweight, dbias, batch * npieces, dim, width, ROWS=rows, COLUMNS=columns)
    return dx, dweight, dbias, dinitial_states
