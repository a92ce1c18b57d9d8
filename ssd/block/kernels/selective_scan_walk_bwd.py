"""selective_scan_walk_bwd, docs/block.md, equations (S5) to (S11), token by token, from the last to the first.

A tile of tokens begins with a state that the forward kept. It is walked forwards once, which leaves the state before every
turn of four tokens in shared memory; then backwards, a turn at a time: its states and decays are computed once more, into
registers, and the gradient of the state passes by them.

Reads what `selective_scan_walk` names, states as selective_scan_walk_fwd wrote them, and dlast_state (batch, dim, dstate),
any strides, or None. Writes du, ddelta and dz (batch, dim, seqlen), contiguous, in the dtypes of u, delta and z; and as partial
sums in fp32 dA (batch, dim, dstate), dD and ddelta_bias (batch, dim), dB and dC (programs of a group, batch, ngroups, dstate,
seqlen).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels.arguments import cdiv, output, strides
from ...kernels.sum_several import sum_several
from ...runtime.launch import launch
from .selective_scan_arguments import Form, Strides
from .selective_scan_dispatch import TOKENS
from .selective_scan_walk import (
    FLAT,
    LOG2E,
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
    prepend,
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


@gluon.constexpr_function
def start_rows(dstate):
    """States [channels, dstate] in shared memory; the swizzle halves the bank conflicts of 16."""
    return gl.SwizzledSharedLayout(4, 2, dstate // 4, [1, 0])


@gluon.constexpr_function
def across_rows(lanes, dstate):
    """Rows [32, sums] in shared memory, each written by its lane, 16 bytes at a time; the swizzle keeps lanes apart."""
    blocks = max(1, lanes * dstate // 32)  # of 16 bytes in a row
    return gl.SwizzledSharedLayout(4, max(1, 8 // blocks), min(8, blocks), [1, 0])


@gluon.constexpr_function
def across_lanes(lanes, dstate):
    """The layout in which a thread has from all rows what it adds up: `lanes` rows are of the same states."""

    def powers(least, limit, axis):
        found = []
        while least < limit:
            found.append([least, 0] if axis == 0 else [0, least])
            least *= 2
        return found

    rows, width, own = 32 // lanes, lanes * dstate // 8, max(1, dstate // 8)
    lane_bases = powers(own, width, 1) + powers(1, rows, 0)
    lane_bases += [[0, 0]] * (5 - len(lane_bases))
    return gl.DistributedLinearLayout(powers(1, own, 1) + powers(rows, 32, 0), lane_bases, [], [], [32, width])


@gluon.jit
def sum_of_thread(v, R: gl.constexpr):
    """Sums [channels / R, dstate] of the channels that a thread has."""
    return gl.sum(gl.reshape(v, [v.shape[0] // R, R, v.shape[1]]), 1)


@gluon.jit
def sum_across(across, values):
    """Four tensors [lanes, dstate], what lanes have summed of their own channels, summed over the lanes: [dstate, 2, 2]."""
    LANES: gl.constexpr = values[0].shape[0]
    N: gl.constexpr = values[0].shape[1]
    across.store(gl.reshape(stack(values), [32, LANES * N // 8]))
    rows = across.load(across_lanes(LANES, N))
    return gl.reshape(gl.sum(gl.reshape(rows, [LANES, N * 4]), 0), [N, 2, 2])


# strides behind what is read: behind all tensors, ptxas spills 8 bytes more on sm_90
@gluon.jit
def selective_scan_walk_bwd_kernel(u, delta, A, B, C, D, z, delta_bias, dout, states, dlast_state, strides, du, ddelta, dz, dA,
                                   dB, dC, dD, ddelta_bias, seqlen, batch, FORM: gl.constexpr, R: gl.constexpr):
    TURN: gl.constexpr = 4
    STATES: gl.constexpr = lanes_and_states(FORM.channels, R, FORM.columns)
    TILE: gl.constexpr = tile_layout(FORM.channels, FORM.chunk)
    SHARED_TILE: gl.constexpr = tile_layout(FORM.columns, FORM.chunk)
    b, g, first_channel, d, in_d, n, in_n, tokens, shared_tokens = locate(FORM, TILE, SHARED_TILE)
    u = row_pointers(u, strides.u, b, d, tokens, FORM)
    delta = row_pointers(delta, strides.delta, b, d, tokens, FORM)
    dout = row_pointers(dout, strides.dout, b, d, tokens, FORM)
    B = state_pointers(B, strides.B, b, g, n, shared_tokens, FORM)
    C = state_pointers(C, strides.C, b, g, n, shared_tokens, FORM)
    of_row = contiguous(b * FORM.dim + d, tokens, seqlen, FORM)
    part = (first_channel // FORM.channels * batch + b) * FORM.ngroups + g
    of_part = contiguous(part * FORM.dstate + n, shared_tokens, seqlen, FORM)
    if z is not None:
        z = row_pointers(z, strides.z, b, d, tokens, FORM)
    bias = load_of_channels(delta_bias, strides.delta_bias, d, in_d)
    skip = load_of_channels(D, strides.D, d, in_d)

    d_states, in_states, n_states, at, exists = locate_states(g, first_channel, FORM, STATES)
    rate = load_rates(A, strides.A, d_states, in_states, FORM, STATES)
    dstate = gl.zeros(rate.shape, gl.float32, STATES)
    if dlast_state is not None:
        dlast_state += gl.expand_dims(b * strides.dlast_state[0] + d_states.to(gl.int64) * strides.dlast_state[1], 1)
        dlast_state += gl.expand_dims(n_states.to(gl.int64) * strides.dlast_state[2], 0)
        dstate += gl.load(dlast_state, mask=exists, other=0.0).to(gl.float32)
    drate = gl.zeros(rate.shape, gl.float32, STATES)
    dskip = gl.zeros(d.shape, gl.float32, gl.SliceLayout(1, TILE))
    dbias = gl.zeros(d.shape, gl.float32, gl.SliceLayout(1, TILE))

    steps = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    dys = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    Bs = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.columns], FLAT)
    Cs = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.columns], FLAT)
    starts = gl.allocate_shared_memory(gl.float32, [FORM.chunk // TURN, FORM.channels, FORM.columns], start_rows(FORM.columns))
    ys = gl.allocate_shared_memory(gl.float32, [FORM.chunk, FORM.channels], FLAT)
    ACROSS: gl.constexpr = across_rows(FORM.channels // R, FORM.columns)
    across_dB = gl.allocate_shared_memory(gl.float32, [32, FORM.channels // R * FORM.columns // 8], ACROSS)
    across_dC = gl.allocate_shared_memory(gl.float32, [32, FORM.channels // R * FORM.columns // 8], ACROSS)

    nchunks = (seqlen + FORM.chunk - 1) // FORM.chunk
    for c in range(nchunks):
        first = (nchunks - 1 - c) * FORM.chunk
        state = gl.load(states + (b * nchunks + (nchunks - 1 - c)) * (FORM.dim * FORM.dstate) + at, mask=exists, other=0.0)
        step = step_of(load_tile(delta, first, in_d, tokens, seqlen, FORM).to(gl.float32) + bias, first, tokens, seqlen, FORM)
        tokens_last(steps).store(step)
        tokens_last(weights).store(step * load_tile(u, first, in_d, tokens, seqlen, FORM).to(gl.float32))
        dy = load_tile(dout, first, in_d, tokens, seqlen, FORM).to(gl.float32)
        if z is not None:
            z_t = load_tile(z, first, in_d, tokens, seqlen, FORM).to(gl.float32)
            dy *= z_t * sigmoid(z_t)
        tokens_last(dys).store(dy)
        tokens_last(Bs).store(load_tile(B, first, in_n, shared_tokens, seqlen, FORM).to(gl.float32))
        tokens_last(Cs).store(load_tile(C, first, in_n, shared_tokens, seqlen, FORM).to(gl.float32))

        for turn in range(FORM.chunk // TURN):
            starts.index(turn).store(state)
            for i in gl.static_range(TURN):
                t = turn * TURN + i
                decay = exp2(of_channels(steps, t, STATES) * rate)
                state = decay * state + of_channels(weights, t, STATES) * of_states(Bs, t, STATES)

        for back in range(FORM.chunk // TURN):
            turn = FORM.chunk // TURN - 1 - back
            state = starts.index(turn).load(STATES)
            before, decays, y, dC_turn = (), (), (), ()
            for i in gl.static_range(TURN):
                t = turn * TURN + i
                decays = append(decays, exp2(of_channels(steps, t, STATES) * rate))
                state = decays[i] * state + of_channels(weights, t, STATES) * of_states(Bs, t, STATES)
                if i < TURN - 1:
                    before = append(before, state)
                dC_turn = append(dC_turn, sum_of_thread(of_channels(dys, t, STATES) * state, R))
                if z is not None:
                    y = append(y, gl.sum(state * of_states(Cs, t, STATES), 1))
            dC_turn = sum_across(across_dC, dC_turn)
            if z is not None:
                store_turn(ys, turn, stack(y))
            dweight, dstep, dB_turn = (), (), ()
            for i in gl.static_range(TURN - 1, -1, -1):
                t = turn * TURN + i
                dstate += of_states(Cs, t, STATES) * of_channels(dys, t, STATES)
                dweight = prepend(gl.sum(dstate * of_states(Bs, t, STATES), 1), dweight)
                dB_turn = prepend(sum_of_thread(of_channels(weights, t, STATES) * dstate, R), dB_turn)
                dstate *= decays[i]
                # (S9), of what was left of the state; the first is read again, or would take registers all the while
                ddecay = dstate * (before[i - 1] if i > 0 else starts.index(turn).load(STATES))
                dstep = prepend(gl.sum(ddecay * rate, 1), dstep)
                drate += ddecay * of_channels(steps, t, STATES)
            # over what this turn has read, since shared memory decides how many programs an SM has
            store_turn(Bs, turn, sum_across(across_dB, dB_turn))
            store_turn(Cs, turn, dC_turn)
            store_turn(weights, turn, stack(dweight))
            store_turn(dys, turn, stack(dstep))

        u_t = load_tile(u, first, in_d, tokens, seqlen, FORM).to(gl.float32)
        raw = load_tile(delta, first, in_d, tokens, seqlen, FORM).to(gl.float32) + bias
        dy = load_tile(dout, first, in_d, tokens, seqlen, FORM).to(gl.float32)
        if z is not None:
            z_t = load_tile(z, first, in_d, tokens, seqlen, FORM).to(gl.float32)
            s = sigmoid(z_t)
            y_t = tokens_last(ys).load(TILE) + skip * u_t
            store_tile(dz, of_row, first, in_d, tokens, seqlen, dy * y_t * (s * (1.0 + z_t * (1.0 - s))), FORM)
            dy *= z_t * s
        dweight_t = tokens_last(weights).load(TILE)
        dstep_t = u_t * dweight_t + tokens_last(dys).load(TILE) * (1 / LOG2E)
        step = tokens_last(steps).load(TILE)
        if FORM.softplus:
            dstep_t *= sigmoid(raw)
        store_tile(du, of_row, first, in_d, tokens, seqlen, step * dweight_t + skip * dy, FORM)
        store_tile(ddelta, of_row, first, in_d, tokens, seqlen, dstep_t, FORM)
        store_tile(dB, of_part, first, in_n, shared_tokens, seqlen, tokens_last(Bs).load(SHARED_TILE), FORM)
        store_tile(dC, of_part, first, in_n, shared_tokens, seqlen, tokens_last(Cs).load(SHARED_TILE), FORM)
        dskip += gl.sum(dy * u_t, 1)
        dbias += gl.sum(gl.where(gl.expand_dims(first + tokens < seqlen, 0), dstep_t, 0.0), 1)

    gl.store(dA + b * (FORM.dim * FORM.dstate) + at, drate, mask=exists)
    if dD is not None:
        gl.store(dD + b * FORM.dim + d, dskip, mask=in_d)
    if ddelta_bias is not None:
        gl.store(ddelta_bias + b * FORM.dim + d, dbias, mask=in_d)


def selective_scan_walk_bwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                            delta_bias: Tensor | None, softplus: bool, states: Tensor, dout: Tensor,
                            dlast_state: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns du, ddelta, dA, dB, dC, dD, dz, ddelta_bias: None for what was absent."""
    (batch, dim, seqlen), (ngroups, dstate) = u.shape, B.shape[1:3]
    channels, rows = channels_and_rows(batch, dim, seqlen, dstate)

    def parts(*shape: int) -> Tensor:
        return torch.empty(*shape, device=u.device, dtype=torch.float32)

    du, ddelta, dz = output(u), output(delta), None if z is None else output(z)
    dB, dC = output(B), output(C)
    programs = cdiv(dim // ngroups, channels)
    dA_parts, dB_parts, dC_parts = parts(batch, dim, dstate), parts(programs, *dB.shape), parts(programs, *dC.shape)
    dD_parts, bias_parts = (None if t is None else parts(batch, dim) for t in (D, delta_bias))
    unit, (u, delta, B, C, z, dout), (*units, dout_units) = choose_unit(u, delta, B, C, z, dout)
    launch(
        selective_scan_walk_bwd_kernel, programs * ngroups * batch,
        u, delta, A, B, C, D, z, delta_bias, dout, states, dlast_state,
        Strides(*units, A.stride(), strides(D), strides(delta_bias), dout_units, strides(dlast_state)),
        du, ddelta, dz, dA_parts, dB_parts, dC_parts, dD_parts, bias_parts, seqlen, batch,
        Form(dim, ngroups, dstate, unit, softplus, TOKENS, channels, columns(dstate)), R=rows, num_warps=1)
    dA, dD, ddelta_bias = (None if t is None else torch.empty(t.shape, device=u.device, dtype=t.dtype)
                           for t in (A, D, delta_bias))
    pairs = ((dB_parts, dB), (dC_parts, dC), (dA_parts, dA), (dD_parts, dD), (bias_parts, ddelta_bias))
    sum_several(*[pair for pair in pairs if pair[1] is not None])
    return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias
