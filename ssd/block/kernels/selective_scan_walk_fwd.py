"""selective_scan_walk_fwd, docs/block.md, equations (S1) to (S4), token by token.

Reads what `selective_scan_walk` names. Writes out (batch, dim, seqlen), contiguous, in the dtype of u; last_state (batch, dim,
dstate) fp32; and states (batch, nchunks, dim, dstate) fp32, the state before every TOKENS tokens, unless they are None.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels.arguments import cdiv, strides
from ...runtime.launch import launch
from .selective_scan_dispatch import TOKENS
from .selective_scan_walk import (
    FLAT,
    append,
    channels_and_rows,
    choose_unit,
    columns,
    contiguous,
    exp2,
    lanes_and_states,
    load_of_channels,
    load_rates,
    load_tile,
    locate,
    locate_states,
    of_channels,
    of_states,
    row_pointers,
    sigmoid,
    stack,
    state_pointers,
    step_of,
    store_tile,
    store_turn,
    tile_layout,
    tokens_last,
)


@gluon.jit
def selective_scan_walk_fwd_kernel(u, u_strides, delta, delta_strides, A, A_strides, B, B_strides, C, C_strides, D, D_strides,
                                   z, z_strides, delta_bias, bias_strides, out, last_state, states, seqlen,
                                   DIM: gl.constexpr, NGROUPS: gl.constexpr, DSTATE: gl.constexpr, UNIT: gl.constexpr,
                                   SOFTPLUS: gl.constexpr, TOKENS: gl.constexpr, CHANNELS: gl.constexpr, R: gl.constexpr,
                                   N: gl.constexpr):
    TURN: gl.constexpr = 4
    STATES: gl.constexpr = lanes_and_states(CHANNELS, R, N)
    TILE: gl.constexpr = tile_layout(CHANNELS, TOKENS)
    SHARED_TILE: gl.constexpr = tile_layout(N, TOKENS)
    b, g, first_channel = locate(DIM, NGROUPS, CHANNELS)
    EACH: gl.constexpr = DIM // NGROUPS
    k = first_channel + gl.arange(0, CHANNELS, gl.SliceLayout(1, TILE))
    d, in_d = g * EACH + k, k < EACH
    n = gl.arange(0, N, gl.SliceLayout(1, SHARED_TILE)).to(gl.int64)
    in_n = n < DSTATE
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, TILE))
    shared_tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, SHARED_TILE))
    u = row_pointers(u, u_strides, b, d, tokens, UNIT)
    delta = row_pointers(delta, delta_strides, b, d, tokens, UNIT)
    B = state_pointers(B, B_strides, b, g, n, shared_tokens, UNIT)
    C = state_pointers(C, C_strides, b, g, n, shared_tokens, UNIT)
    if z is not None:
        z = row_pointers(z, z_strides, b, d, tokens, UNIT)
    of_row = contiguous(b * DIM + d, tokens, seqlen, UNIT)

    d_states, in_states, _, at, exists = locate_states(g, first_channel, EACH, DSTATE, CHANNELS, N, STATES)
    rate = load_rates(A, A_strides, d_states, in_states, DSTATE, N, STATES)

    steps = gl.allocate_shared_memory(gl.float32, [TOKENS, CHANNELS], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [TOKENS, CHANNELS], FLAT)
    ys = gl.allocate_shared_memory(gl.float32, [TOKENS, CHANNELS], FLAT)
    Bs = gl.allocate_shared_memory(gl.float32, [TOKENS, N], FLAT)
    Cs = gl.allocate_shared_memory(gl.float32, [TOKENS, N], FLAT)

    u_next = load_tile(u, 0, in_d, tokens, seqlen, UNIT)
    delta_next = load_tile(delta, 0, in_d, tokens, seqlen, UNIT)
    B_next = load_tile(B, 0, in_n, shared_tokens, seqlen, UNIT)
    C_next = load_tile(C, 0, in_n, shared_tokens, seqlen, UNIT)
    if z is not None:
        z_next = load_tile(z, 0, in_d, tokens, seqlen, UNIT)
    bias = load_of_channels(delta_bias, bias_strides, d, in_d)
    skip = load_of_channels(D, D_strides, d, in_d)
    state = gl.zeros([CHANNELS, N], gl.float32, STATES)
    for first in range(0, seqlen, TOKENS):
        if states is not None:
            chunk = b * ((seqlen + TOKENS - 1) // TOKENS) + first // TOKENS
            gl.store(states + chunk * (DIM * DSTATE) + at, state, mask=exists)
        u_t = u_next.to(gl.float32)
        step = step_of(delta_next.to(gl.float32) + bias, first, tokens, seqlen, SOFTPLUS)
        tokens_last(steps, TOKENS, CHANNELS).store(step)
        tokens_last(weights, TOKENS, CHANNELS).store(step * u_t)
        tokens_last(Bs, TOKENS, N).store(B_next.to(gl.float32))
        tokens_last(Cs, TOKENS, N).store(C_next.to(gl.float32))
        y_t = skip * u_t
        if z is not None:
            z_t = z_next.to(gl.float32)
            gate = z_t * sigmoid(z_t)
        after = first + TOKENS
        u_next = load_tile(u, after, in_d, tokens, seqlen, UNIT)
        delta_next = load_tile(delta, after, in_d, tokens, seqlen, UNIT)
        B_next = load_tile(B, after, in_n, shared_tokens, seqlen, UNIT)
        C_next = load_tile(C, after, in_n, shared_tokens, seqlen, UNIT)
        if z is not None:
            z_next = load_tile(z, after, in_d, tokens, seqlen, UNIT)
        for turn in range(TOKENS // TURN):
            y = ()
            for i in gl.static_range(TURN):
                t = turn * TURN + i
                decay = exp2(of_channels(steps, t, STATES) * rate)
                state = decay * state + of_channels(weights, t, STATES) * of_states(Bs, t, STATES)
                y = append(y, gl.sum(state * of_states(Cs, t, STATES), 1))
            store_turn(ys, turn, stack(y))
        y_t += tokens_last(ys, TOKENS, CHANNELS).load(TILE)
        if z is not None:
            y_t *= gate
        store_tile(out, of_row, first, in_d, tokens, seqlen, y_t, UNIT)
    gl.store(last_state + b * (DIM * DSTATE) + at, state, mask=exists)


def selective_scan_walk_fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                            delta_bias: Tensor | None, softplus: bool,
                            save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out, last_state and, if `save`, states."""
    (batch, dim, seqlen), (ngroups, dstate) = u.shape, B.shape[1:3]
    channels, rows = channels_and_rows(batch, dim, seqlen, dstate)
    out = torch.empty(u.shape, device=u.device, dtype=u.dtype)
    last_state = torch.empty(batch, dim, dstate, device=u.device, dtype=torch.float32)
    states = torch.empty(batch, cdiv(seqlen, TOKENS), dim, dstate, device=u.device, dtype=torch.float32) if save else None
    unit, ((u, u_units), (delta, delta_units), (B, B_units), (C, C_units), (z, z_units)) = choose_unit(u, delta, B, C, z)
    launch(
        selective_scan_walk_fwd_kernel, cdiv(dim // ngroups, channels) * ngroups * batch,
        u, u_units, delta, delta_units, A, A.stride(), B, B_units, C, C_units, D, strides(D), z, z_units, delta_bias,
        strides(delta_bias), out, last_state, states, seqlen, dim, ngroups, dstate, unit, softplus, TOKENS,
        CHANNELS=channels, R=rows, N=columns(dstate), num_warps=1)
    return out, last_state, states
