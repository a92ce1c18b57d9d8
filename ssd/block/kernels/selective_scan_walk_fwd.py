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
from .selective_scan_arguments import Form, Strides
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
def selective_scan_walk_fwd_kernel(u, delta, A, B, C, D, z, delta_bias, out, last_state, states, strides, seqlen,
                                   FORM: gl.constexpr, R: gl.constexpr):
    TURN: gl.constexpr = 4
    STATES: gl.constexpr = lanes_and_states(FORM.channels, R, FORM.columns)
    TILE: gl.constexpr = tile_layout(FORM.channels, FORM.chunk)
    SHARED_TILE: gl.constexpr = tile_layout(FORM.columns, FORM.chunk)
    b, g, first_channel, d, in_d, n, in_n, tokens, shared_tokens = locate(FORM, TILE, SHARED_TILE)
    u = row_pointers(u, strides.u, b, d, tokens, FORM)
    delta = row_pointers(delta, strides.delta, b, d, tokens, FORM)
    B = state_pointers(B, strides.B, b, g, n, shared_tokens, FORM)
    C = state_pointers(C, strides.C, b, g, n, shared_tokens, FORM)
    if z is not None:
        z = row_pointers(z, strides.z, b, d, tokens, FORM)
    of_row = contiguous(b * FORM.dim + d, tokens, seqlen, FORM)

    d_states, in_states, _, at, exists = locate_states(g, first_channel, FORM, STATES)
    rate = load_rates(A, strides.A, d_states, in_states, FORM, STATES)

    steps = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    ys = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    Bs = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.columns], FLAT)
    Cs = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.columns], FLAT)

    u_next = load_tile(u, 0, in_d, tokens, seqlen, FORM)
    delta_next = load_tile(delta, 0, in_d, tokens, seqlen, FORM)
    B_next = load_tile(B, 0, in_n, shared_tokens, seqlen, FORM)
    C_next = load_tile(C, 0, in_n, shared_tokens, seqlen, FORM)
    if z is not None:
        z_next = load_tile(z, 0, in_d, tokens, seqlen, FORM)
    bias = load_of_channels(delta_bias, strides.delta_bias, d, in_d)
    skip = load_of_channels(D, strides.D, d, in_d)
    state = gl.zeros(rate.shape, gl.float32, STATES)
    for first in range(0, seqlen, FORM.chunk):
        if states is not None:
            chunk = b * ((seqlen + FORM.chunk - 1) // FORM.chunk) + first // FORM.chunk
            gl.store(states + chunk * (FORM.dim * FORM.dstate) + at, state, mask=exists)
        u_t = u_next.to(gl.float32)
        step = step_of(delta_next.to(gl.float32) + bias, first, tokens, seqlen, FORM)
        tokens_last(steps).store(step)
        tokens_last(weights).store(step * u_t)
        tokens_last(Bs).store(B_next.to(gl.float32))
        tokens_last(Cs).store(C_next.to(gl.float32))
        y_t = skip * u_t
        if z is not None:
            z_t = z_next.to(gl.float32)
            gate = z_t * sigmoid(z_t)
        after = first + FORM.chunk
        u_next = load_tile(u, after, in_d, tokens, seqlen, FORM)
        delta_next = load_tile(delta, after, in_d, tokens, seqlen, FORM)
        B_next = load_tile(B, after, in_n, shared_tokens, seqlen, FORM)
        C_next = load_tile(C, after, in_n, shared_tokens, seqlen, FORM)
        if z is not None:
            z_next = load_tile(z, after, in_d, tokens, seqlen, FORM)
        for turn in range(FORM.chunk // TURN):
            y = ()
            for i in gl.static_range(TURN):
                t = turn * TURN + i
                decay = exp2(of_channels(steps, t, STATES) * rate)
                state = decay * state + of_channels(weights, t, STATES) * of_states(Bs, t, STATES)
                y = append(y, gl.sum(state * of_states(Cs, t, STATES), 1))
            store_turn(ys, turn, stack(y))
        y_t += tokens_last(ys).load(TILE)
        if z is not None:
            y_t *= gate
        store_tile(out, of_row, first, in_d, tokens, seqlen, y_t, FORM)
    gl.store(last_state + b * (FORM.dim * FORM.dstate) + at, state, mask=exists)


def selective_scan_walk_fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                            delta_bias: Tensor | None, softplus: bool,
                            save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out, last_state and, if `save`, states."""
    (batch, dim, seqlen), (ngroups, dstate) = u.shape, B.shape[1:3]
    channels, rows = channels_and_rows(batch, dim, seqlen, dstate)
    out = torch.empty(u.shape, device=u.device, dtype=u.dtype)
    last_state = torch.empty(batch, dim, dstate, device=u.device, dtype=torch.float32)
    states = torch.empty(batch, cdiv(seqlen, TOKENS), dim, dstate, device=u.device, dtype=torch.float32) if save else None
    unit, (u, delta, B, C, z), units = choose_unit(u, delta, B, C, z)
    launch(
        selective_scan_walk_fwd_kernel, cdiv(dim // ngroups, channels) * ngroups * batch,
        u, delta, A, B, C, D, z, delta_bias, out, last_state, states,
        Strides(*units, A.stride(), strides(D), strides(delta_bias)), seqlen,
        Form(dim, ngroups, dstate, unit, softplus, TOKENS, channels, columns(dstate)), R=rows, num_warps=1)
    return out, last_state, states
