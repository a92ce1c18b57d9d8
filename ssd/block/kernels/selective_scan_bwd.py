"""selective_scan_bwd, docs/block.md, equations (S5) to (S12), in two kernels.

dstates walks the chunks backwards and leaves the gradient of the state after each. grads then takes all chunks at once: a
program holds B and C of one chunk and the sums of their gradients in registers, while a part of its group's channels goes by.

Read what `selective_scan` names, states as selective_scan_fwd wrote them, and dlast_state (batch, dim, dstate), any strides, or
None. Write du, ddelta and dz (batch, dim, seqlen), contiguous, in the dtypes of u, delta and z; and as partial sums in fp32 dA
(batch * nchunks, dim, dstate), dD and ddelta_bias (batch * nchunks, dim), dB and dC (splits, batch, ngroups, dstate, seqlen).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, output, strides
from ...kernels.device import LOG2E, product, sigmoid, softplus
from ...kernels.sum_parts import sum_first
from ...runtime import tuning
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
    suffixes,
    unit_of,
    walkers,
)
from .selective_scan_arguments import Form, Strides

_PROGRAMS = 4  # of grads, for each SM
_WARPS = 8  # of grads, for a tile of 4096


@triton.jit(do_not_specialize=COUNTS)
def selective_scan_dstates_kernel(delta, A, C, z, delta_bias, dout, dlast_state, dstates, strides, seqlen, nchunks,
                                  FORM: tl.constexpr):
    b, g, d, in_d, offs_t = locate(FORM)
    offs_n = tl.arange(0, FORM.columns)[None, :]
    at, in_state = (b * nchunks * FORM.dim + d) * FORM.dstate + offs_n, in_d & (offs_n < FORM.dstate)
    delta += (b * strides.delta[0] + d * strides.delta[1]) * FORM.unit
    dout += (b * strides.dout[0] + d * strides.dout[1]) * FORM.unit
    C += (b * strides.C[0] + g * strides.C[1]) * FORM.unit
    A += d * strides.A[0]
    if z is not None:
        z += (b * strides.z[0] + d * strides.z[1]) * FORM.unit
    bias = 0.0
    if delta_bias is not None:
        bias = tl.load(delta_bias + d * strides.delta_bias[0]).to(tl.float32)

    dstate = tl.full([FORM.channels, FORM.columns], 0.0, tl.float32)
    if dlast_state is not None:
        last = b * strides.dlast_state[0] + d * strides.dlast_state[1] + offs_n.to(tl.int64) * strides.dlast_state[2]
        dstate += tl.load(dlast_state + last, mask=in_state, other=0.0).to(tl.float32)
    for k in range(nchunks - 1):
        c = nchunks - 1 - k
        first = c * FORM.chunk
        tl.store(dstates + tl.cast(c, tl.int64) * FORM.dim * FORM.dstate + at, dstate, mask=in_state)
        dy = load_tokens(dout, first, offs_t, seqlen, FORM)
        if z is not None:
            gate, _ = gate_and_slope(load_tokens(z, first, offs_t, seqlen, FORM))
            dy *= gate
        _, step = load_step(delta, bias, first, offs_t, seqlen, FORM)
        since, whole = tl.cumsum(step, 1), tl.sum(step, 1)[:, None]
        for n in range(FORM.dstate):
            row = tl.cast(n, tl.int64)
            rate = finite(tl.load(A + row * strides.A[1]).to(tl.float32)) * LOG2E
            C_t = load_tokens(C + row * strides.C[2] * FORM.unit, first, offs_t, seqlen, FORM)
            after = tl.sum(tl.where(offs_n == n, dstate, 0.0), 1)[:, None]
            within = tl.sum(product(tl.math.exp2(since * rate), C_t * dy), 1)[:, None]
            dstate = tl.where(offs_n == n, tl.math.exp2(whole * rate) * after + within, dstate)
    tl.store(dstates + at, dstate, mask=in_state)


@triton.jit(do_not_specialize=COUNTS)
def selective_scan_grads_kernel(u, delta, A, B, C, D, z, delta_bias, dout, states, dstates, du, ddelta, dz, dA, dB, dC, dD,
                                ddelta_bias, strides, seqlen, nchunks, batch, FORM: tl.constexpr, SPLITS: tl.constexpr,
                                LOG_LANES: tl.constexpr):
    EACH: tl.constexpr = FORM.dim // FORM.ngroups
    PART: tl.constexpr = (EACH + SPLITS - 1) // SPLITS
    split, number = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    g, number = tl.cast(number % FORM.ngroups, tl.int64), number // FORM.ngroups
    c, b = number % nchunks, tl.cast(number // nchunks, tl.int64)
    first = c * FORM.chunk
    offs_n, offs_t = tl.arange(0, FORM.columns).to(tl.int64), tl.arange(0, FORM.chunk)
    in_n, tokens = offs_n < FORM.dstate, tl.cast(first, tl.int64) + offs_t
    in_t = tokens < seqlen
    B += (b * strides.B[0] + g * strides.B[1] + offs_n[:, None] * strides.B[2]) * FORM.unit
    C += (b * strides.C[0] + g * strides.C[1] + offs_n[:, None] * strides.C[2]) * FORM.unit
    readable = in_n[:, None] & (tokens // FORM.unit < (seqlen + FORM.unit - 1) // FORM.unit)[None, :]
    B_t = tl.load(B + tokens[None, :], mask=readable, other=0.0).to(tl.float32)
    C_t = tl.load(C + tokens[None, :], mask=readable, other=0.0).to(tl.float32)
    has_before = (offs_t > 0) & (tokens <= seqlen)
    B_before = tl.load(B + tokens[None, :] - 1, mask=in_n[:, None] & has_before[None, :], other=0.0).to(tl.float32)
    dB_t, dC_t = tl.zeros(B_t.shape, tl.float32), tl.zeros(B_t.shape, tl.float32)

    for k in range(split * PART, tl.minimum(split * PART + PART, EACH)):
        d = g * EACH + k
        row = (b * nchunks + c) * FORM.dim + d  # of what each chunk has of each channel
        at = (b * FORM.dim + d) * seqlen + tokens
        rate = finite(tl.load(A + d * strides.A[0] + offs_n * strides.A[1], mask=in_n, other=0.0).to(tl.float32))
        before = tl.load(states + row * FORM.dstate + offs_n, mask=in_n, other=0.0)
        after = tl.load(dstates + row * FORM.dstate + offs_n, mask=in_n, other=0.0)
        bias, skip = 0.0, 0.0
        if delta_bias is not None:
            bias = tl.load(delta_bias + d * strides.delta_bias[0]).to(tl.float32)
        if D is not None:
            skip = tl.load(D + d * strides.D[0]).to(tl.float32)
        inputs = u + (b * strides.u[0] + d * strides.u[1]) * FORM.unit
        steps = delta + (b * strides.delta[0] + d * strides.delta[1]) * FORM.unit
        u_t = load_tokens(inputs, first, offs_t, seqlen, FORM)
        dy = load_tokens(dout + (b * strides.dout[0] + d * strides.dout[1]) * FORM.unit, first, offs_t, seqlen, FORM)
        raw, step = load_step(steps, bias, first, offs_t, seqlen, FORM)
        _, step_after = load_step(steps, bias, first + 1, offs_t, seqlen, FORM)
        # `after` is the gradient of the chunk's last state itself
        step_after = tl.where(offs_t == FORM.chunk - 1, 0.0, step_after)

        binary = (rate * LOG2E)[:, None]
        # what is left of the state before each token is scanned for, since (S9) wants it: h less what enters would lose it
        step_before = tl.load(steps + tokens - 1, mask=has_before, other=0.0).to(tl.float32) + bias
        step_before = softplus(step_before) if FORM.softplus else step_before
        u_before = tl.load(inputs + tokens - 1, mask=has_before, other=0.0).to(tl.float32)
        decay = tl.math.exp2(step[None, :] * binary)
        entered = tl.where(offs_t[None, :] == 0, before[:, None], (step_before * u_before)[None, :] * B_before)
        _, left = tl.associative_scan((decay, decay * entered), 1, compose)
        h = left + (step * u_t)[None, :] * B_t
        if z is not None:
            z_t = load_tokens(z + (b * strides.z[0] + d * strides.z[1]) * FORM.unit, first, offs_t, seqlen, FORM)
            gate, slope = gate_and_slope(z_t)
            y = tl.sum(h * C_t, 0) + skip * u_t
            tl.store(dz + at, (dy * y * slope).to(dz.dtype.element_ty), mask=in_t)
            dy *= gate
        dC_t += h * dy[None, :]
        dh = suffixes(tl.math.exp2(step_after[None, :] * binary), C_t * dy[None, :], after, LOG_LANES)
        dB_t += dh * (step * u_t)[None, :]
        dentering = tl.sum(dh * B_t, 0)
        ddecay = dh * left
        dstep = u_t * dentering + tl.sum(ddecay * rate[:, None], 0)
        if FORM.softplus:
            dstep *= sigmoid(raw)
        tl.store(du + at, (step * dentering + skip * dy).to(du.dtype.element_ty), mask=in_t)
        tl.store(ddelta + at, dstep.to(ddelta.dtype.element_ty), mask=in_t)
        tl.store(dA + row * FORM.dstate + offs_n, tl.sum(ddecay * step[None, :], 1), mask=in_n)
        if dD is not None:
            tl.store(dD + row, tl.sum(product(dy, u_t), 0))
        if ddelta_bias is not None:
            tl.store(ddelta_bias + row, tl.sum(tl.where(in_t, dstep, 0.0), 0))

    part = (split.to(tl.int64) * batch + b) * FORM.ngroups + g
    at = (part * FORM.dstate + offs_n[:, None]) * seqlen + tokens[None, :]
    tl.store(dB + at, dB_t, mask=in_n[:, None] & in_t[None, :])
    tl.store(dC + at, dC_t, mask=in_n[:, None] & in_t[None, :])


def selective_scan_bwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                       delta_bias: Tensor | None, softplus: bool, states: Tensor, dout: Tensor,
                       dlast_state: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns du, ddelta, dA, dB, dC, dD, dz, ddelta_bias: None for what was absent, sums over tokens in fp32."""
    (batch, dim, seqlen), (ngroups, dstate) = u.shape, B.shape[1:3]
    chunk, nchunks = chunk_of(seqlen, dstate), states.shape[1]

    def parts(*shape: int) -> Tensor:
        return torch.empty(*shape, device=u.device, dtype=torch.float32)

    du, ddelta, dz = output(u), output(delta), None if z is None else output(z)
    dB, dC = output(B), output(C)
    dstates = torch.empty_like(states)
    (u, delta, B, C, z, dout), (*units, dout_units) = pad_to_units(u, delta, B, C, z, dout)
    all_strides = Strides(*units, A.stride(), strides(D), strides(delta_bias), dout_units, strides(dlast_state))
    form = Form(dim, ngroups, dstate, unit_of(seqlen), softplus, chunk, CHANNELS, next_power_of_2(dstate))
    launch(
        selective_scan_dstates_kernel, walkers(batch, dim, ngroups),
        delta, A, C, z, delta_bias, dout, dlast_state, dstates, all_strides, seqlen, nchunks, form, num_warps=CHANNELS)

    wanted = _PROGRAMS * tuning.current_device(u.device.index).sms
    splits = min(next_power_of_2(cdiv(wanted, batch * nchunks * ngroups)), dim // ngroups)
    splits = cdiv(dim // ngroups, cdiv(dim // ngroups, splits))  # none without a channel
    rows = batch * nchunks
    dA_parts, dB_parts, dC_parts = parts(rows, dim, dstate), parts(splits, *dB.shape), parts(splits, *dC.shape)
    dD_parts, bias_parts = (None if t is None else parts(rows, dim) for t in (D, delta_bias))
    launch(
        selective_scan_grads_kernel, splits * ngroups * nchunks * batch,
        u, delta, A, B, C, D, z, delta_bias, dout, states, dstates, du, ddelta, dz, dA_parts, dB_parts, dC_parts, dD_parts,
        bias_parts, all_strides, seqlen, nchunks, batch, form, SPLITS=splits, LOG_LANES=min(32, chunk).bit_length() - 1,
        num_warps=max(1, _WARPS * chunk * form.columns // 4096))

    sum_first(dB_parts, dB)
    sum_first(dC_parts, dC)
    dA, dD, ddelta_bias = (None if t is None else sum_first(t, torch.empty_like(t[0]))
                           for t in (dA_parts, dD_parts, bias_parts))
    return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias
