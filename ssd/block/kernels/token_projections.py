"""The two projections of a Mamba-2 block for one token of a few sequences, each with what is beside it, docs/block.md, (T1) to
(T6): the norm before the first and the convolution after it, the norm before the second and the sum after it.

Reads residual (batch, d_model) and y (batch, channels), rows of any stride; weights of 16 bits as `nn.Linear` and the block
have them, contiguous. Writes zxbcdt (batch, columns) in the dtype of the weights, moves conv_state (batch, conv_dim, past), any
strides, one token on, and writes the residual stream with what is added to it.

A norm is one number for a row (and group), so it scales the sum of products at the end: a program goes through its input
once, along with the weights, which are nearly all that is moved. A program takes a few columns, each of its threads 8 channels
of each: sums go through registers alone until the last one over threads. Loads of several programs of an SM are under way at a
time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...runtime import tuning
from ...runtime.dependent_launch import begin_early, let_next_begin, wait_for_last
from ...runtime.launch import launch
from .conv1d import convolve, load_filter, sigmoid

MOST = 2  # sequences; cuBLAS is faster at more
SHORTEST_GROUP = 128  # channels; groups of a norm are multiples of it, or all channels
_WARPS = 4
_EACH = 8  # channels of a thread, 16 bytes
_COLUMNS = 4  # of a program; of one sequence 8 where that leaves enough programs, and 2 of the second projection
_PROGRAMS = 4  # for each SM are enough


class Form(NamedTuple):
    """What a kernel is compiled for, as one constexpr argument."""

    batch: int
    channels: int  # that go in
    columns: int  # that go out
    group: int  # channels that are normed together
    first: int = 0  # column of the first channel that is convolved
    conv_dim: int = 0
    width: int = 0  # of the filter


@triton.jit
def add_products(sums, w, v, BLOCK_N: tl.constexpr, EACH: tl.constexpr):
    """sums [N, K / EACH] with those of w [N, K] times v [K]."""
    products = w.to(tl.float32) * v[None, :]
    return sums + tl.sum(tl.reshape(products, [BLOCK_N, products.shape[1] // EACH, EACH]), 2)


@triton.jit
def load_weight(weight, columns, k, in_k, FORM: tl.constexpr):
    """A tile [N, K]."""
    at = columns.to(tl.int64)[:, None] * FORM.channels + k[None, :]
    return tl.load(weight + at, mask=(columns < FORM.columns)[:, None] & in_k[None, :], other=0.0)


@triton.jit
def load_bias(bias, columns, FORM: tl.constexpr):
    """Of the columns [N] in fp32, zeros for None."""
    offset = tl.zeros([columns.shape[0]], tl.float32)
    if bias is not None:
        offset += tl.load(bias + columns, mask=columns < FORM.columns, other=0.0).to(tl.float32)
    return offset


@triton.jit
def project_in_kernel(residual, residual_stride, norm_weight, weight, bias, conv_state, state_strides, conv_weight,
                      weight_strides, conv_bias, out, eps, FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                      EACH: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    dtype: tl.constexpr = weight.dtype.element_ty
    BATCH: tl.constexpr = FORM.batch
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = columns - FORM.first
    live = (channels >= 0) & (channels < FORM.conv_dim)
    taps, offset = load_filter(conv_weight, weight_strides, conv_bias, channels, live, FORM.width)
    k = tl.arange(0, BLOCK_K)
    w = load_weight(weight, columns, k, k < FORM.channels, FORM)  # those of a step are loaded in the one before
    wait_for_last(EARLY)
    conv_state += channels.to(tl.int64) * state_strides[1]
    past, sums, squares = (), (), ()
    for b in tl.static_range(BATCH):
        for i in tl.static_range(FORM.width - 1):
            past += (tl.load(conv_state + b * state_strides[0] + i * state_strides[2], mask=live, other=0.0),)
        sums += (tl.zeros([BLOCK_N, BLOCK_K // EACH], tl.float32),)
        squares += (tl.zeros([BLOCK_K], tl.float32),)

    for _ in range(0, FORM.channels, BLOCK_K):
        in_k = k < FORM.channels
        next_w = load_weight(weight, columns, k + BLOCK_K, k + BLOCK_K < FORM.channels, FORM)
        scale = tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)
        new_sums, new_squares = (), ()
        for b in tl.static_range(BATCH):
            v = tl.load(residual + b * residual_stride + k, mask=in_k, other=0.0).to(dtype).to(tl.float32)
            new_squares += (squares[b] + v * v,)
            new_sums += (add_products(sums[b], w, (v * scale).to(dtype).to(tl.float32), BLOCK_N, EACH),)
        sums, squares, w, k = new_sums, new_squares, next_w, k + BLOCK_K

    offset_out = load_bias(bias, columns, FORM)
    tl.debug_barrier()  # what was read of conv_state may now be overwritten, by whichever thread
    for b in tl.static_range(BATCH):
        norm = tl.math.rsqrt(tl.sum(squares[b], 0) / FORM.channels + eps)
        y = (tl.sum(sums[b], 1) * norm + offset_out).to(dtype)
        rows = ()
        for i in tl.static_range(FORM.width - 1):
            entry = past[b * (FORM.width - 1) + i]
            rows += (entry.to(tl.float32),)
            if i > 0:
                tl.store(conv_state + b * state_strides[0] + (i - 1) * state_strides[2], entry, mask=live)
        tl.store(conv_state + b * state_strides[0] + (FORM.width - 2) * state_strides[2], y.to(conv_state.dtype.element_ty),
                 mask=live)
        rows += (y.to(tl.float32),)
        pre = convolve(rows, taps, offset, FORM.width)
        y = tl.where(live, (pre * sigmoid(pre)).to(dtype), y)
        tl.store(out + b * FORM.columns + columns, y, mask=columns < FORM.columns)


@triton.jit
def project_out_kernel(y, y_stride, norm_weight, weight, bias, residual, residual_stride, out, eps, FORM: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    dtype: tl.constexpr = weight.dtype.element_ty
    BATCH: tl.constexpr = FORM.batch
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < FORM.columns
    k = tl.arange(0, BLOCK_K)
    w = load_weight(weight, columns, k, k < FORM.group, FORM)  # those of a step are loaded in the one before
    wait_for_last(EARLY)
    before, totals = (), ()
    for b in tl.static_range(BATCH):
        before += (tl.load(residual + b * residual_stride + columns, mask=inside, other=0.0),)
        totals += (tl.zeros([BLOCK_N], tl.float32),)

    for _ in range(0, FORM.channels, FORM.group):
        sums, squares = (), ()
        for _ in tl.static_range(BATCH):
            sums += (tl.zeros([BLOCK_N, BLOCK_K // EACH], tl.float32),)
            squares += (tl.zeros([BLOCK_K], tl.float32),)
        for _ in range(0, FORM.group, BLOCK_K):
            in_k = k < FORM.channels
            # a group is of whole steps, or the only one
            next_w = load_weight(weight, columns, k + BLOCK_K, k + BLOCK_K < FORM.channels, FORM)
            new_sums, new_squares = (), ()
            for b in tl.static_range(BATCH):
                v = tl.load(y + b * y_stride + k, mask=in_k, other=0.0).to(tl.float32)
                new_squares += (squares[b] + v * v,)
                if norm_weight is not None:
                    v = (v * tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
                new_sums += (add_products(sums[b], w, v, BLOCK_N, EACH),)
            sums, squares, w, k = new_sums, new_squares, next_w, k + BLOCK_K
        new_totals = ()
        for b in tl.static_range(BATCH):
            part = tl.sum(sums[b], 1)
            if norm_weight is not None:
                part *= tl.math.rsqrt(tl.sum(squares[b], 0) / FORM.group + eps)
            new_totals += (totals[b] + part,)
        totals = new_totals

    offset = load_bias(bias, columns, FORM)
    for b in tl.static_range(BATCH):
        after = before[b].to(tl.float32) + (totals[b] + offset).to(dtype).to(tl.float32)
        tl.store(out + b * FORM.columns + columns, after.to(out.dtype.element_ty), mask=inside)


def project_in(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, conv_state: Tensor,
               conv_weight: Tensor, conv_bias: Tensor | None, first: int) -> Tensor:
    """(T1) to (T3): returns the projection, of which the conv_dim columns from `first` on are convolved."""
    columns, channels = weight.shape
    batch, conv_dim, past = conv_state.shape
    out = torch.empty(batch, columns, device=weight.device, dtype=weight.dtype)
    form = Form(batch, channels, columns, channels, first, conv_dim, past + 1)
    programs, tile = _choose_tile(form, weight)
    launch(
        project_in_kernel, programs, residual, residual.stride(0), norm_weight, weight, bias, conv_state, conv_state.stride(),
        conv_weight, conv_weight.stride(), conv_bias, out, eps, form, **tile)
    return out


def project_out(y: Tensor, norm_weight: Tensor | None, eps: float, group: int, weight: Tensor, bias: Tensor | None,
                residual: Tensor) -> Tensor:
    """(T5) and (T6): returns the residual stream afterwards. group: channels normed together, with a norm_weight."""
    columns, channels = weight.shape
    out = torch.empty(len(y), columns, device=residual.device, dtype=residual.dtype)
    form = Form(len(y), channels, columns, group if norm_weight is not None else channels)
    programs, tile = _choose_tile(form, weight)
    launch(
        project_out_kernel, programs, y, y.stride(0), norm_weight, weight, bias, residual, residual.stride(0), out, eps,
        form, **tile)
    return out


def _choose_tile(form: Form, weight: Tensor) -> tuple[int, dict[str, int]]:
    """How many programs, and the size of their tiles, of measured times (docs/log/decoding.md)."""
    columns, warps = _COLUMNS, _WARPS
    if form.batch == 1 and form.columns < form.channels:  # the second projection
        columns, warps = _COLUMNS // 2, 2 * _WARPS
    elif form.batch == 1 and cdiv(form.columns, 2 * columns) >= _PROGRAMS * tuning.current_device(weight.device.index).sms:
        columns *= 2
    depth = 32 * warps * _EACH
    if form.group < form.channels:
        depth = min(depth, form.group & -form.group)
    return cdiv(form.columns, columns), {
        "BLOCK_N": columns, "BLOCK_K": depth, "EACH": _EACH, "num_warps": max(1, depth // (32 * _EACH)),
        **begin_early(weight.device.index)}
