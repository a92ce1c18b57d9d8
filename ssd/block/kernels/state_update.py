"""One token of the recurrence, docs/block.md, equations (U1) to (U4): the state is replaced in place, in one launch.

Reads and writes state (rows, nheads, dim, dstate); reads x, dt, z (batch, nheads, dim), A (nheads, dim, dstate), B, C (batch,
ngroups, dstate), D, dt_bias (nheads, dim), each fp16, bf16 or fp32, any strides; state_batch_indices (batch,), integers. Writes
out (batch, nheads, dim) in the dtype of x, contiguous, from the state in fp32, before that is rounded to its dtype.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, strides
from ...kernels.device import LOG2E, product, sigmoid, softplus, unpack_program
from ...runtime.dependent_launch import begin_early, let_next_begin, wait_for_last
from ...runtime.launch import launch
from ...runtime.tuning import next_power_of_2

_TILE = 2048  # elements of the state
_PER_WARP = 512


class Strides(NamedTuple):
    """The strides of the tensors that may have any, as one argument; () for those that are absent."""

    state: tuple[int, ...]
    x: tuple[int, ...]
    dt: tuple[int, ...]
    A: tuple[int, ...]
    B: tuple[int, ...]
    C: tuple[int, ...]
    D: tuple[int, ...]
    z: tuple[int, ...]
    dt_bias: tuple[int, ...]


class Form(NamedTuple):
    """What the kernel is compiled for, as one constexpr argument."""

    nheads: int
    ngroups: int
    dim: int
    dstate: int
    softplus: bool
    tied: bool  # see `_is_tied`


@triton.jit
def load_vector(t, stride, offs, inside):
    return tl.load(t + offs * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def state_update_kernel(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out, strides, rows, FORM: tl.constexpr,
                        BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    tile, h, _, b = unpack_program((FORM.dim + BLOCK_P - 1) // BLOCK_P, FORM.nheads, 1)
    g = h // (FORM.nheads // FORM.ngroups)
    offs_p = (tile * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    row = b
    if state_batch_indices is not None:
        row = tl.load(state_batch_indices + b).to(tl.int64)
    # padding loads nothing, and so its output is 0
    valid = (row >= 0) & (row < rows)
    in_p = (offs_p < FORM.dim) & valid
    in_n = (offs_n < FORM.dstate) & valid
    in_tile = in_p[:, None] & in_n[None, :]

    # what is the same all over a head is one element, and so its exponential
    tied_p, tied_n = offs_p, offs_n
    if FORM.tied:
        tied_p, tied_n = tl.arange(0, 1).to(tl.int64), tl.arange(0, 1).to(tl.int64)
    in_tied = (tied_p < FORM.dim) & valid
    step = load_vector(dt + b * strides.dt[0] + h * strides.dt[1], strides.dt[2], tied_p, in_tied)
    if dt_bias is not None:
        step += load_vector(dt_bias + h * strides.dt_bias[0], strides.dt_bias[1], tied_p, in_tied)
    if FORM.softplus:
        step = softplus(step)
    A += h * strides.A[0]
    rate = tl.load(A + tied_p[:, None] * strides.A[1] + tied_n[None, :] * strides.A[2],
                   mask=in_tied[:, None] & (tied_n < FORM.dstate)[None, :], other=0.0).to(tl.float32)
    # not clamped: a product has the sign of its factors, and what that may be is the caller's
    kept = tl.math.exp2(rate * step[:, None] * LOG2E)

    x_p = load_vector(x + b * strides.x[0] + h * strides.x[1], strides.x[2], offs_p, in_p)
    B_n = load_vector(B + b * strides.B[0] + g * strides.B[1], strides.B[2], offs_n, in_n)
    C_n = load_vector(C + b * strides.C[0] + g * strides.C[1], strides.C[2], offs_n, in_n)
    state += row * strides.state[0] + h * strides.state[1]
    at = state + offs_p[:, None] * strides.state[2] + offs_n[None, :] * strides.state[3]
    new = tl.load(at, mask=in_tile, other=0.0).to(tl.float32) * kept + (step * x_p)[:, None] * B_n[None, :]
    tl.store(at, new.to(state.dtype.element_ty), mask=in_tile)

    y = tl.sum(product(new, C_n[None, :]), 1)
    if D is not None:
        y += load_vector(D + h * strides.D[0], strides.D[1], offs_p, in_p) * x_p
    if z is not None:
        gate = load_vector(z + b * strides.z[0] + h * strides.z[1], strides.z[2], offs_p, in_p)
        y *= gate * sigmoid(gate)
    tl.store(out + (b * FORM.nheads + h) * FORM.dim + offs_p, y.to(out.dtype.element_ty), mask=offs_p < FORM.dim)


def state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                 dt_bias: Tensor | None, dt_softplus: bool, state_batch_indices: Tensor | None) -> Tensor:
    """Returns out; state holds the new one."""
    rows, nheads, dim, dstate = state.shape
    batch, ngroups = x.shape[0], B.shape[1]
    out = torch.empty(batch, nheads, dim, device=x.device, dtype=x.dtype)
    columns = next_power_of_2(dstate)
    block_p = min(next_power_of_2(dim), max(1, _TILE // columns))
    tensors = (state, x, dt, A, B, C, D, z, dt_bias)
    form = Form(nheads, ngroups, dim, dstate, dt_softplus, _is_tied(dt, A, dt_bias))
    launch(
        state_update_kernel, cdiv(dim, block_p) * nheads * batch,
        *tensors, state_batch_indices, out, Strides(*map(strides, tensors)), rows, form,
        BLOCK_P=block_p, BLOCK_N=columns, num_warps=min(32, max(1, block_p * columns // _PER_WARP)),
        **begin_early(x.device.index))
    return out


def _is_tied(dt: Tensor, A: Tensor, dt_bias: Tensor | None) -> bool:
    """Whether step and rate are one number for each head, as Mamba-2 has them, repeated with strides of 0."""
    return A.stride()[1:] == (0, 0) and dt.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0)
