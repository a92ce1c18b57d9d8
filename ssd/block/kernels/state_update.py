"""One token of the recurrence, docs/block.md, equations (U1) to (U4): the state is replaced in place, in one launch.

Reads and writes state (rows, nheads, dim, dstate); reads x, dt, z (batch, nheads, dim), A (nheads, dim, dstate), B, C (batch,
ngroups, dstate), D, dt_bias (nheads, dim), each fp16, bf16 or fp32, any strides; state_batch_indices (batch,), integers. Writes
out (batch, nheads, dim) in the dtype of x, contiguous, from the state in fp32, before that is rounded to its dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, strides
from ...kernels.device import LOG2E, product, sigmoid, softplus, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import next_power_of_2

_TILE = 2048  # elements of the state
_PER_WARP = 512


@triton.jit
def load_vector(t, stride, offs, inside):
    return tl.load(t + offs * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def state_update_kernel(state, state_strides, x, x_strides, dt, dt_strides, A, A_strides, B, B_strides, C, C_strides, D,
                        D_strides, z, z_strides, dt_bias, dt_bias_strides, state_batch_indices, out, rows,
                        NHEADS: tl.constexpr, NGROUPS: tl.constexpr, DIM: tl.constexpr, DSTATE: tl.constexpr,
                        SOFTPLUS: tl.constexpr, TIED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    tile, h, _, b = unpack_program((DIM + BLOCK_P - 1) // BLOCK_P, NHEADS, 1)
    g = h // (NHEADS // NGROUPS)
    offs_p = (tile * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    row = b
    if state_batch_indices is not None:
        row = tl.load(state_batch_indices + b).to(tl.int64)
    # padding loads nothing, and so its output is 0
    valid = (row >= 0) & (row < rows)
    in_p = (offs_p < DIM) & valid
    in_n = (offs_n < DSTATE) & valid
    in_tile = in_p[:, None] & in_n[None, :]

    # what is the same all over a head is one element, and so its exponential
    tied_p, tied_n = offs_p, offs_n
    if TIED:
        tied_p, tied_n = tl.arange(0, 1).to(tl.int64), tl.arange(0, 1).to(tl.int64)
    in_tied = (tied_p < DIM) & valid
    step = load_vector(dt + b * dt_strides[0] + h * dt_strides[1], dt_strides[2], tied_p, in_tied)
    if dt_bias is not None:
        step += load_vector(dt_bias + h * dt_bias_strides[0], dt_bias_strides[1], tied_p, in_tied)
    if SOFTPLUS:
        step = softplus(step)
    A += h * A_strides[0]
    rate = tl.load(A + tied_p[:, None] * A_strides[1] + tied_n[None, :] * A_strides[2],
                   mask=in_tied[:, None] & (tied_n < DSTATE)[None, :], other=0.0).to(tl.float32)
    # not clamped: a product has the sign of its factors, and what that may be is the caller's
    kept = tl.math.exp2(rate * step[:, None] * LOG2E)

    x_p = load_vector(x + b * x_strides[0] + h * x_strides[1], x_strides[2], offs_p, in_p)
    B_n = load_vector(B + b * B_strides[0] + g * B_strides[1], B_strides[2], offs_n, in_n)
    C_n = load_vector(C + b * C_strides[0] + g * C_strides[1], C_strides[2], offs_n, in_n)
    state += row * state_strides[0] + h * state_strides[1]
    at = state + offs_p[:, None] * state_strides[2] + offs_n[None, :] * state_strides[3]
    new = tl.load(at, mask=in_tile, other=0.0).to(tl.float32) * kept + (step * x_p)[:, None] * B_n[None, :]
    tl.store(at, new.to(state.dtype.element_ty), mask=in_tile)

    y = tl.sum(product(new, C_n[None, :]), 1)
    if D is not None:
        y += load_vector(D + h * D_strides[0], D_strides[1], offs_p, in_p) * x_p
    if z is not None:
        gate = load_vector(z + b * z_strides[0] + h * z_strides[1], z_strides[2], offs_p, in_p)
        y *= gate * sigmoid(gate)
    tl.store(out + (b * NHEADS + h) * DIM + offs_p, y.to(out.dtype.element_ty), mask=offs_p < DIM)


def state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                 dt_bias: Tensor | None, dt_softplus: bool, state_batch_indices: Tensor | None) -> Tensor:
    """Returns out; state holds the new one."""
    rows, nheads, dim, dstate = state.shape
    batch, ngroups = x.shape[0], B.shape[1]
    out = torch.empty(batch, nheads, dim, device=x.device, dtype=x.dtype)
    columns = next_power_of_2(dstate)
    block_p = min(next_power_of_2(dim), max(1, _TILE // columns))
    launch(
        state_update_kernel, cdiv(dim, block_p) * nheads * batch,
        state, state.stride(), x, x.stride(), dt, dt.stride(), A, A.stride(), B, B.stride(), C, C.stride(), D, strides(D),
        z, strides(z), dt_bias, strides(dt_bias), state_batch_indices, out, rows, nheads, ngroups, dim, dstate, dt_softplus,
        _is_tied(dt, A, dt_bias), BLOCK_P=block_p, BLOCK_N=columns, num_warps=min(32, max(1, block_p * columns // _PER_WARP)))
    return out


def _is_tied(dt: Tensor, A: Tensor, dt_bias: Tensor | None) -> bool:
    """Whether step and rate are one number for each head, as Mamba-2 has them, repeated with strides of 0."""
    return A.stride()[1:] == (0, 0) and dt.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0)
