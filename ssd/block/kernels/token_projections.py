"""The two projections of a Mamba-2 block for one token of a few sequences, each with what is beside it, docs/block.md, (T1) to
(T6): the norm before the first and the convolution after it, the gated norm before the second and the sum after it.

Reads residual (batch, d_model), y and zxbcdt (batch, channels), rows of any stride; weights of 16 bits as `nn.Linear` and the
block have them, contiguous. Writes zxbcdt (batch, width) in the dtype of the weights, moves conv_state (batch, conv_dim,
width of the filter - 1), any strides, one token on, and adds to residual in place.

A norm is one number for a row (and group), so it is multiplied to the product's sum: the inputs need to be read but once, with
the weights, which are nearly all that is moved. A program takes some columns and all of the batch, which is a side of 8 of the
tensor cores' tile, whatever it is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv
from ...runtime import tuning
from ...runtime.launch import launch
from .conv1d import load_filter, sigmoid

MOST = 8  # sequences
_COLUMNS = 32  # of a program, where these fill the GPU, else half as many
_DEPTH = 256  # channels of a step
_STAGES = 5  # steps under way
_WARPS = 4
_ALIGNMENT = 64  # elements


class Form(NamedTuple):
    """What a kernel is compiled for, as one constexpr argument."""

    channels: int  # that go in
    columns: int  # that go out
    group: int  # channels that are normed together; of the second projection, 0 for none
    first: int = 0  # column of the first channel that is convolved
    conv_dim: int = 0
    width: int = 0  # of the filter
    norm_before_gate: bool = False


@triton.jit
def load_weight(weight, columns, channels, inside, FORM: tl.constexpr):
    """A tile [N, K]."""
    at = columns.to(tl.int64)[:, None] * FORM.channels + channels[None, :]
    return tl.load(weight + at, mask=(columns < FORM.columns)[:, None] & inside[None, :], other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def project_in_kernel(residual, residual_stride, norm_weight, weight, bias, conv_state, state_strides, conv_weight,
                      weight_strides, conv_bias, out, out_stride, batch, eps, FORM: tl.constexpr, BATCH: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.arange(0, BATCH).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (columns < FORM.columns)[:, None] & (rows < batch)[None, :]
    channels = columns - FORM.first
    convolved = (channels >= 0) & (channels < FORM.conv_dim)
    live = convolved[:, None] & (rows < batch)[None, :]
    taps, offset = load_filter(conv_weight, weight_strides, conv_bias, channels, convolved, FORM.width)
    conv_state += rows[None, :] * state_strides[0] + channels.to(tl.int64)[:, None] * state_strides[1]
    past = ()
    for i in tl.static_range(FORM.width - 1):
        past += (tl.load(conv_state + i * state_strides[2], mask=live, other=0.0),)

    total = tl.zeros([BLOCK_N, BATCH], tl.float32)
    squares = tl.zeros([BATCH], tl.float32)
    for start in tl.range(0, FORM.channels, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < FORM.channels
        v = tl.load(residual + rows[:, None] * residual_stride + k[None, :], mask=(rows < batch)[:, None] & in_k[None, :],
                    other=0.0).to(dtype).to(tl.float32)
        squares += tl.sum(v * v, 1)
        v *= tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
        total = tl.dot(load_weight(weight, columns, k, in_k, FORM), tl.trans(v.to(dtype)), total)
    y = total * tl.math.rsqrt(squares / FORM.channels + eps)[None, :]
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < FORM.columns, other=0.0).to(tl.float32)[:, None]
    y = y.to(dtype)

    pre = y.to(tl.float32) * taps[FORM.width - 1][:, None] + offset[:, None]
    for i in tl.static_range(FORM.width - 1):
        pre += past[i].to(tl.float32) * taps[i][:, None]
    tl.debug_barrier()  # what was read may now be overwritten, by whichever thread
    for i in tl.static_range(FORM.width - 2):
        tl.store(conv_state + i * state_strides[2], past[i + 1], mask=live)
    tl.store(conv_state + (FORM.width - 2) * state_strides[2], y.to(conv_state.dtype.element_ty), mask=live)
    y = tl.where(convolved[:, None], (pre * sigmoid(pre)).to(dtype), y)
    tl.store(out + rows[None, :] * out_stride + columns[:, None], y, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def project_out_kernel(y, y_stride, z, z_stride, norm_weight, weight, bias, residual, residual_stride, batch, eps,
                       FORM: tl.constexpr, BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                       STAGES: tl.constexpr):
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.arange(0, BATCH).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (columns < FORM.columns)[:, None] & (rows < batch)[None, :]
    residual += rows[None, :] * residual_stride + columns[:, None]
    before = tl.load(residual, mask=inside, other=0.0)

    total = tl.zeros([BLOCK_N, BATCH], tl.float32)
    part = tl.zeros([BLOCK_N, BATCH], tl.float32)  # of a group
    squares = tl.zeros([BATCH], tl.float32)
    for start in tl.range(0, FORM.channels, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < FORM.channels
        at_rows = (rows < batch)[:, None] & in_k[None, :]
        v = tl.load(y + rows[:, None] * y_stride + k[None, :], mask=at_rows, other=0.0).to(tl.float32)
        if norm_weight is not None:
            gate = tl.load(z + rows[:, None] * z_stride + k[None, :], mask=at_rows, other=0.0).to(tl.float32)
            gate *= sigmoid(gate)
            if not FORM.norm_before_gate:
                v *= gate
            squares += tl.sum(v * v, 1)
            v *= tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
            if FORM.norm_before_gate:
                v *= gate
        part = tl.dot(load_weight(weight, columns, k, in_k, FORM), tl.trans(v.to(dtype)), part)
        if FORM.group < FORM.channels:
            ends = (start + BLOCK_K) % FORM.group == 0
            total += tl.where(ends, part * tl.math.rsqrt(squares / FORM.group + eps)[None, :], 0.0)
            part, squares = tl.where(ends, 0.0, part), tl.where(ends, 0.0, squares)
    if FORM.group == FORM.channels:
        total = part
        if norm_weight is not None:
            total *= tl.math.rsqrt(squares / FORM.group + eps)[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < FORM.columns, other=0.0).to(tl.float32)[:, None]
    after = before.to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(residual, after.to(residual.dtype.element_ty), mask=inside)


def project_in(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, conv_state: Tensor,
               conv_weight: Tensor, conv_bias: Tensor | None, first: int) -> Tensor:
    """(T1) to (T3): returns the projection, of which the conv_dim columns from `first` on are convolved."""
    columns, channels = weight.shape
    batch, conv_dim, past = conv_state.shape
    aligned = cdiv(columns, _ALIGNMENT) * _ALIGNMENT  # or the second projection could not load its rows ahead
    out = torch.empty(batch, aligned, device=weight.device, dtype=weight.dtype)[:, :columns]
    form = Form(channels, columns, channels, first, conv_dim, past + 1)
    programs, tile = _choose_tile(form, weight)
    launch(
        project_in_kernel, programs, residual, residual.stride(0), norm_weight, weight, bias, conv_state, conv_state.stride(),
        conv_weight, conv_weight.stride(), conv_bias, out, aligned, batch, eps, form, MOST, **tile)
    return out


def project_out(y: Tensor, z: Tensor, norm_weight: Tensor | None, eps: float, group: int, norm_before_gate: bool,
                weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """(T4) to (T6): adds to residual. Without norm_weight, y is gated already."""
    columns, channels = weight.shape
    form = Form(channels, columns, group if norm_weight is not None else channels, norm_before_gate=norm_before_gate)
    programs, tile = _choose_tile(form, weight)
    launch(
        project_out_kernel, programs, y, y.stride(0), z, z.stride(0), norm_weight, weight, bias, residual, residual.stride(0),
        len(y), eps, form, MOST, **tile)


def _choose_tile(form: Form, weight: Tensor) -> tuple[int, dict[str, int]]:
    """How many programs, and the size of their tiles: a step is of one group."""
    fills = cdiv(form.columns, _COLUMNS) >= tuning.current_device(weight.device.index).sms
    block_n = _COLUMNS if fills else _COLUMNS // 2
    block_k = _DEPTH if form.group == form.channels else min(_DEPTH, form.group & -form.group)
    return cdiv(form.columns, block_n), {"BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": _STAGES, "num_warps": _WARPS}
