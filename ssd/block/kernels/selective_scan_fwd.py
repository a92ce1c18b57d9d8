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
from .selective_scan_arguments import Form, Strides


@triton.jit(do_not_specialize=COUNTS)
def selective_scan_fwd_kernel(u, delta, A, B, C, D, z, delta_bias, out, last_state, states, strides, seqlen, nchunks,
                              FORM: tl.constexpr):
    b, g, d, in_d, offs_t = locate(FORM)
    offs_n = tl.arange(0, FORM.columns)[None, :]
    at, in_state = (b * FORM.dim + d) * FORM.dstate + offs_n, in_d & (offs_n < FORM.dstate)
    u += (b * strides.u[0] + d * strides.u[1]) * FORM.unit
    delta += (b * strides.delta[0] + d * strides.delta[1]) * FORM.unit
    B += (b * strides.B[0] + g * strides.B[1]) * FORM.unit
    C += (b * strides.C[0] + g * strides.C[1]) * FORM.unit
    out += (b * FORM.dim + d) * seqlen
    A += d * strides.A[0]
    if z is not None:
        z += (b * strides.z[0] + d * strides.z[1]) * FORM.unit
    bias, skip = 0.0, 0.0
    if delta_bias is not None:
        bias = tl.load(delta_bias + d * strides.delta_bias[0]).to(tl.float32)
    if D is not None:
        skip = tl.load(D + d * strides.D[0]).to(tl.float32)

    state = tl.full([FORM.channels, FORM.columns], 0.0, tl.float32)
    for c in range(nchunks):
        first = c * FORM.chunk
        if states is not None:
            tl.store(states + (b * (nchunks - 1) + c) * FORM.dim * FORM.dstate + at, state, mask=in_state)
        u_t = load_tokens(u, first, offs_t, seqlen, FORM)
        _, step = load_step(delta, bias, first, offs_t, seqlen, FORM)
        weighted = step * u_t
        y = skip * u_t
        for n in range(FORM.dstate):
            row = tl.cast(n, tl.int64)
            rate = finite(tl.load(A + row * strides.A[1]).to(tl.float32)) * LOG2E
            B_t = load_tokens(B + row * strides.B[2] * FORM.unit, first, offs_t, seqlen, FORM)
            C_t = load_tokens(C + row * strides.C[2] * FORM.unit, first, offs_t, seqlen, FORM)
            before = tl.sum(tl.where(offs_n == n, state, 0.0), 1)[:, None]
            decay, entering = tl.math.exp2(step * rate), weighted * B_t
            # the state enters with the first token: one product, where the pairs of all tokens would take one each
            entering = tl.where(offs_t == 0, entering + decay * before, entering)
            _, h = tl.associative_scan((decay, entering), 1, compose)
            y += h * C_t
            after = tl.sum(tl.where(offs_t == FORM.chunk - 1, h, 0.0), 1)[:, None]
            state = tl.where(offs_n == n, after, state)
        if z is not None:
            gate, _ = gate_and_slope(load_tokens(z, first, offs_t, seqlen, FORM))
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
    (u, delta, B, C, z), units = pad_to_units(u, delta, B, C, z)
    launch(
        selective_scan_fwd_kernel, walkers(batch, dim, ngroups),
        u, delta, A, B, C, D, z, delta_bias, out, last_state, states,
        Strides(*units, A.stride(), strides(D), strides(delta_bias)), seqlen, nchunks,
        Form(dim, ngroups, dstate, unit_of(seqlen), softplus, chunk, CHANNELS, next_power_of_2(dstate)), num_warps=CHANNELS)
    return out, last_state, states
