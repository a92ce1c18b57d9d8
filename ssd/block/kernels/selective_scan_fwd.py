"""selective_scan_fwd, docs/block.md, equations (S1) to (S4): a program walks the chunks of a few channels, a warp for each,
with their states in registers.

Reads what `selective_scan` names. Writes out (batch, dim, seqlen), contiguous, in the dtype of u; last_state (batch, dim,
dstate) fp32; and states (batch, nchunks, dim, dstate) fp32, the state before each chunk, unless they are None.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, strides
from ...kernels.device import LOG2E
from ...runtime.launch import launch
from ...runtime.tuning import next_power_of_2
from .selective_scan import (
    CHANNELS,
    chunk_of,
    compose,
    finite,
    gate_and_slope,
    load_step,
    load_tokens,
    locate,
    pad_to_units,
    unit_of,
    walkers,
)


@triton.jit(do_not_specialize=COUNTS)
def selective_scan_fwd_kernel(u, u_strides, delta, delta_strides, A, A_strides, B, B_strides, C, C_strides, D, D_strides, z,
                              z_strides, delta_bias, bias_strides, out, last_state, states, seqlen, nchunks, DIM: tl.constexpr,
                              NGROUPS: tl.constexpr, DSTATE: tl.constexpr, UNIT: tl.constexpr, SOFTPLUS: tl.constexpr,
                              CHANNELS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    b, g, d, in_d, offs_t = locate(DIM, NGROUPS, CHANNELS, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    at, in_state = (b * DIM + d) * DSTATE + offs_n, in_d & (offs_n < DSTATE)
    u += (b * u_strides[0] + d * u_strides[1]) * UNIT
    delta += (b * delta_strides[0] + d * delta_strides[1]) * UNIT
    B += (b * B_strides[0] + g * B_strides[1]) * UNIT
    C += (b * C_strides[0] + g * C_strides[1]) * UNIT
    out += (b * DIM + d) * seqlen
    A += d * A_strides[0]
    if z is not None:
        z += (b * z_strides[0] + d * z_strides[1]) * UNIT
    bias, skip = 0.0, 0.0
    if delta_bias is not None:
        bias = tl.load(delta_bias + d * bias_strides[0]).to(tl.float32)
    if D is not None:
        skip = tl.load(D + d * D_strides[0]).to(tl.float32)

    state = tl.zeros([CHANNELS, BLOCK_N], tl.float32)
    for c in range(nchunks):
        first = c * CHUNK
        if states is not None:
            tl.store(states + (b * (nchunks - 1) + c) * DIM * DSTATE + at, state, mask=in_state)
        u_t = load_tokens(u, first, offs_t, seqlen, UNIT)
        _, step = load_step(delta, bias, first, offs_t, seqlen, UNIT, SOFTPLUS)
        weighted = step * u_t
        y = skip * u_t
        for n in range(DSTATE):
            row = tl.cast(n, tl.int64)
            rate = finite(tl.load(A + row * A_strides[1]).to(tl.float32)) * LOG2E
            B_t = load_tokens(B + row * B_strides[2] * UNIT, first, offs_t, seqlen, UNIT)
            C_t = load_tokens(C + row * C_strides[2] * UNIT, first, offs_t, seqlen, UNIT)
            before = tl.sum(tl.where(offs_n == n, state, 0.0), 1)[:, None]
            decay, entering = tl.math.exp2(step * rate), weighted * B_t
            # the state enters with the first token: one product, where the pairs of all tokens would take one each
            entering = tl.where(offs_t == 0, entering + decay * before, entering)
            _, h = tl.associative_scan((decay, entering), 1, compose)
            y += h * C_t
            after = tl.sum(tl.where(offs_t == CHUNK - 1, h, 0.0), 1)[:, None]
            state = tl.where(offs_n == n, after, state)
        if z is not None:
            gate, _ = gate_and_slope(load_tokens(z, first, offs_t, seqlen, UNIT))
            y *= gate
        tokens = tl.cast(first, tl.int64) + offs_t
        tl.store(out + tokens, y.to(out.dtype.element_ty), mask=in_d & (tokens < seqlen))
    tl.store(last_state + at, state, mask=in_state)


def selective_scan_fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                       delta_bias: Tensor | None, softplus: bool, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out, last_state and, if `save`, states."""
    (batch, dim, seqlen), (ngroups, dstate) = u.shape, B.shape[1:3]
    chunk = chunk_of(seqlen, dstate)
    nchunks = cdiv(seqlen, chunk)
    out = torch.empty(u.shape, device=u.device, dtype=u.dtype)
    last_state = torch.empty(batch, dim, dstate, device=u.device, dtype=torch.float32)
    states = torch.empty(batch, nchunks, dim, dstate, device=u.device, dtype=torch.float32) if save else None
    (u, u_units), (delta, delta_units), (B, B_units), (C, C_units), (z, z_units) = pad_to_units(u, delta, B, C, z)
    launch(
        selective_scan_fwd_kernel, walkers(batch, dim, ngroups),
        u, u_units, delta, delta_units, A, A.stride(), B, B_units, C, C_units, D, strides(D), z, z_units, delta_bias,
        strides(delta_bias), out, last_state, states, seqlen, nchunks, dim, ngroups, dstate, unit_of(seqlen), softplus,
        CHANNELS=CHANNELS, CHUNK=chunk, BLOCK_N=next_power_of_2(dstate), num_warps=CHANNELS)
    return out, last_state, states
