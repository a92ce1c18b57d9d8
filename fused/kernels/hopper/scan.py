"""hopper_scan, equations (26) to (28): the stationary scan with a role for each warpgroup, in Gluon, for Hopper.

A block holds the states of two neighbouring heads of one group in registers and walks runs of sub-chunks of 64 tokens
(hopper_roles says what a run is). Per sub-chunk, transposed against (26) so that the state and x are wgmma's operand in
registers and only B, C and L pass through shared memory:

    masks (1 warpgroup):         L_h = (B C^T) exp(A_i - A_j) dt_j below the diagonal, [j, i], for both heads from one B C^T
    head (1 warpgroup each):     y^T = (S C^T) exp(A_i) + x^T L + D x^T
                                 S  <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B
    fetch (1 warp):              B, C, x by TMA into a ring of stages

Reads x (batch, seqlen, nheads, 64), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, channels and heads contiguous,
through TMA descriptors that fill rows past seqlen with 0; dt, dA_cumsum (batch, nheads, nsub, 64) fp32, dA_cumsum restarting
every sub-chunk; D (nheads,); initial_states (batch, nheads, 64, dstate); ends, factors as hopper_states writes them.
Writes out as x, final_states (batch, nheads, 64, dstate) fp32, and the state before every sub-chunk, (batch, nsub, nheads, 64,
dstate); or starts each run from one of `starts`, such states of every EVERY sub-chunks.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssd.kernels.arguments import contiguous
from ssd.runtime.gluon_names import async_load, async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SUB_CHUNK, SSDInputs

from .roles import (
    LOG2E,
    barriers,
    decay,
    entering_state,
    given_state,
    load_run,
    load_steps,
    log2,
    row_layout,
    state_offsets,
    tile,
)

# One kernel for all sizes: what divides them, or that one is 1, is of no use to it.
SIZES = ("nruns", "nsub", "nheads", "heads_per_group")
STAGES, SLOTS = 3, 2  # of tiles from memory, of masked tiles a head
_REGISTERS = 128  # a thread at launch; the roles then share them out: 192 a head, 104 masks, 24 fetch


@gluon.jit
def both_bits(a, b):
    """Bitwise and of two tensors of 16-bit elements, two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, True, 2)


@gluon.jit
def kept_state(starts, b, h, c, nsub, nheads, EVERY: gl.constexpr, STATE: gl.constexpr, HEADDIM: gl.constexpr,
               DSTATE: gl.constexpr):
    """The state before the chunk of sub-chunk c, [P, N] fp32."""
    ROWS: gl.constexpr = row_layout(DSTATE)
    row = (b * ((nsub + EVERY - 1) // EVERY) + c // EVERY).to(gl.int64) * nheads + h
    at = row * HEADDIM * DSTATE + state_offsets(ROWS, HEADDIM, DSTATE)
    return gl.convert_layout(gl.load(starts + at), STATE).to(gl.float32)


@gluon.jit
def fetch(x_desc, B_desc, C_desc, full, empty, Xs, Bs, Cs, runs, nruns, heads_per_group):
    """The producer: B, C and x of both heads of each sub-chunk into the next free stage."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    BYTES: gl.constexpr = BLOCK_M * 2 * (2 * HEADDIM + 2 * DSTATE)
    step = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, _, _ = load_run(runs, k)
        h, g = pair * 2, pair * 2 // heads_per_group
        for c in range(first, last):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            async_load(B_desc, [b, c * BLOCK_M, g * DSTATE], bar, Bs.index(stage))
            async_load(C_desc, [b, c * BLOCK_M, g * DSTATE], bar, Cs.index(stage))
            for u in gl.static_range(2):
                async_load(x_desc, [b, c * BLOCK_M, (h + u) * HEADDIM], bar, Xs.index(2 * stage + u))
            step += 1


@gluon.jit
def masks(bars, rings, lines, dA_cumsum, dt, runs, nruns, nsub, nheads, SLOTS: gl.constexpr, BLOCK_M: gl.constexpr,
          DSTATE: gl.constexpr):
    """The consumer warpgroup that makes L of both heads, and exp(A_i) and dt_j exp(A_last - A_j) as vectors.

    dt is in the exponent of L, which so cannot be clamped at 0: where A falls by more than 1e7 in a sub-chunk, fp32 sums of
    it are no longer monotone, and L may overflow.
    """
    full, empty, ready, taken = bars
    Bs, Cs, Ls = rings
    from_start, to_end, A_rows, A_columns = lines
    STAGES: gl.constexpr = full.shape[0]
    DTYPE: gl.constexpr = Bs.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    j, i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, JI)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, JI))
    # all bits of an element or none: one instruction then masks two elements, whatever exp2 made of those above the diagonal
    causal = gl.where(gl.expand_dims(i, 0) >= gl.expand_dims(j, 1), -1, 0).to(gl.int16).to(DTYPE, bitcast=True)
    step = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, _, _ = load_run(runs, k)
        row = (b * nheads + pair * 2).to(gl.int64) * nsub * BLOCK_M
        other = nsub * BLOCK_M  # from a head's row to the next one's
        a0, dt0, end0 = load_steps(dA_cumsum, dt, row + first * BLOCK_M, m, BLOCK_M)
        a1, dt1, end1 = load_steps(dA_cumsum, dt, row + other + first * BLOCK_M, m, BLOCK_M)
        for c in range(first, last):
            stage, slot = step % STAGES, step % SLOTS
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            B, C = tile(Bs, stage, BLOCK_M, DSTATE), tile(Cs, stage, BLOCK_M, DSTATE)
            BC = warpgroup_mma(B, C.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI), use_acc=False, is_async=True)
            for u in gl.static_range(2):
                mbarrier.wait(taken.index(u * SLOTS + slot), (step // SLOTS) & 1 ^ 1)
            for u in gl.static_range(2):
                a, dt_u, end = (a0 if u == 0 else a1) * LOG2E, dt0 if u == 0 else dt1, (end0 if u == 0 else end1) * LOG2E
                A_columns.index(u).store(a)
                A_rows.index(u).store(a - log2(dt_u))
                from_start.index(u * SLOTS + slot).store(gl.exp2(a))
                to_end.index(u * SLOTS + slot).store(dt_u * decay(end - a))
            # the next sub-chunk's, into the same registers: a load into others would wait here for itself
            ahead = row + gl.minimum(c + 1, last - 1) * BLOCK_M
            a0, dt0, end0 = load_steps(dA_cumsum, dt, ahead, m, BLOCK_M)
            a1, dt1, end1 = load_steps(dA_cumsum, dt, ahead + other, m, BLOCK_M)
            block_barrier()
            BC = warpgroup_mma_wait(0, deps=(BC,))
            mbarrier.arrive(empty.index(stage), count=1)
            for u in gl.static_range(2):
                A_i, A_j = A_columns.index(u).load(gl.SliceLayout(0, JI)), A_rows.index(u).load(gl.SliceLayout(1, JI))
                L = (BC * gl.exp2(gl.expand_dims(A_i, 0) - gl.expand_dims(A_j, 1))).to(DTYPE)
                Ls.index(u * SLOTS + slot).store(both_bits(L, causal))
                fence_async_shared()
                block_barrier()
                mbarrier.arrive(ready.index(u * SLOTS + slot), count=1)
            step += 1


@gluon.jit
def head(out_desc, states_desc, bars, rings, lines, dA_cumsum, D, initial_states, ends, factors, final_states, starts, runs,
         nruns, nsub, nheads, U: gl.constexpr, SLOTS: gl.constexpr, EVERY: gl.constexpr, DSTATE: gl.constexpr):
    """The consumer warpgroup of head 2 pair + U: its state, its output."""
    full, empty, ready, taken = bars
    Xs, Bs, Cs, Ls, Ys, Ss = rings
    from_start, to_end = lines
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = out_desc.block_shape[1]
    HEADDIM: gl.constexpr = out_desc.block_shape[2]
    SIZE: gl.constexpr = HEADDIM * DSTATE
    DTYPE: gl.constexpr = Xs.dtype
    PI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # y^T
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PI, 2)
    offsets = state_offsets(STATE, HEADDIM, DSTATE)
    step = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, piece, npieces = load_run(runs, k)
        h = pair * 2 + U
        bh = (b * nheads + h).to(gl.int64)
        if starts is not None:
            state = kept_state(starts, b, h, first, nsub, nheads, EVERY, STATE, HEADDIM, DSTATE)
        else:
            state = given_state(initial_states, bh, offsets, STATE, HEADDIM, DSTATE)
            state = entering_state(state, ends, factors, piece, npieces, offsets, U, HEADDIM, DSTATE)
        A_last = dA_cumsum + bh * nsub * BLOCK_M + BLOCK_M - 1
        end = gl.load(A_last + first * BLOCK_M)
        if D is not None:
            D_h = gl.load(D + h).to(gl.float32)
        for c in range(first, last):
            stage, slot = step % STAGES, U * SLOTS + step % SLOTS
            if states_desc is not None:
                # the wait for the store of y, below, was one for that of the last state too
                tile(Ss, U, HEADDIM, DSTATE).store(state.to(states_desc.dtype))
                fence_async_shared()
                block_barrier()
                async_store(states_desc, [0, ((b * nsub + c) * nheads + h) * HEADDIM, 0], Ss.index(U))
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            B, C = tile(Bs, stage, BLOCK_M, DSTATE), tile(Cs, stage, BLOCK_M, DSTATE)
            x_t = tile(Xs, 2 * stage + U, BLOCK_M, HEADDIM).permute((1, 0))
            x = x_t.load(OPERAND)
            S = gl.convert_layout(state.to(DTYPE), OPERAND)
            state = state * gl.exp2(end * LOG2E)
            mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
            w = gl.expand_dims(to_end.index(slot).load(gl.SliceLayout(0, OPERAND)), 0)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            end = gl.load(A_last + gl.minimum(c + 1, last - 1) * BLOCK_M)
            # both products in flight before anything else touches an accumulator: ptxas would insert a wait
            y = warpgroup_mma(S, C.permute((1, 0)), gl.zeros([HEADDIM, BLOCK_M], gl.float32, PI), use_acc=False, is_async=True)
            state = warpgroup_mma(x_end, B, state, is_async=True)
            w = gl.expand_dims(from_start.index(slot).load(gl.SliceLayout(0, PI)), 0)
            y = warpgroup_mma_wait(1, deps=(y,)) * w
            y = warpgroup_mma(x, Ls.index(slot), y, is_async=True)
            state, y = warpgroup_mma_wait(0, deps=(state, y))
            if D is not None:
                y += D_h * x_t.load(PI).to(gl.float32)  # read again: x as fp32 does not fit beside the accumulators
            store_wait(0)
            block_barrier()
            mbarrier.arrive(taken.index(slot), count=1)
            tile(Ys, U, BLOCK_M, HEADDIM).permute((1, 0)).store(y.to(DTYPE))
            fence_async_shared()
            block_barrier()
            # not before y is there: a load from x that is only on its way would find the next tile (docs/log/hopper-scan.md)
            mbarrier.arrive(empty.index(stage), count=1)
            async_store(out_desc, [b, c * BLOCK_M, h * HEADDIM], Ys.index(U))
            step += 1
        if final_states is not None and last == nsub:
            gl.store(final_states + bh * SIZE + offsets, state)
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_scan_kernel(x_desc, B_desc, C_desc, out_desc, states_desc, dA_cumsum, dt, D, initial_states, ends, factors,
                       final_states, starts, runs, nruns, nsub, nheads, heads_per_group, STAGES: gl.constexpr,
                       SLOTS: gl.constexpr, EVERY: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_M, HEADDIM], x_desc.layout)
    Bs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_M, DSTATE], B_desc.layout)
    Cs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_M, DSTATE], C_desc.layout)
    Ls = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, BLOCK_M, BLOCK_M], SQUARE)
    Ys = gl.allocate_shared_memory(DTYPE, [2, 1, BLOCK_M, HEADDIM], out_desc.layout)
    if states_desc is None:
        Ss: gl.constexpr = None
    else:
        Ss = gl.allocate_shared_memory(states_desc.dtype, [2, 1, HEADDIM, DSTATE], states_desc.layout)
    from_start = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, BLOCK_M], LINE)
    to_end = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, BLOCK_M], LINE)
    A_rows = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], LINE)
    A_columns = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], LINE)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 3)
    ready, taken = barriers(2 * SLOTS, 1), barriers(2 * SLOTS, 1)
    fence_async_shared()
    bars, rings, lines = (full, empty, ready, taken), (Xs, Bs, Cs, Ls, Ys, Ss), (from_start, to_end)
    gl.warp_specialize([
        (head, (out_desc, states_desc, bars, rings, lines, dA_cumsum, D, initial_states, ends, factors, final_states, starts,
                runs, nruns, nsub, nheads, 0, SLOTS, EVERY, DSTATE)),
        (head, (out_desc, states_desc, bars, rings, lines, dA_cumsum, D, initial_states, ends, factors, final_states, starts,
                runs, nruns, nsub, nheads, 1, SLOTS, EVERY, DSTATE)),
        (masks, (bars, (Bs, Cs, Ls), (from_start, to_end, A_rows, A_columns), dA_cumsum, dt, runs, nruns, nsub, nheads, SLOTS,
                 BLOCK_M, DSTATE)),
        (fetch, (x_desc, B_desc, C_desc, full, empty, Xs, Bs, Cs, runs, nruns, heads_per_group)),
    ], [4, 4, 1], [192, 104, 24])


def hopper_scan(i: SSDInputs, x_desc, B_desc, C_desc, out_desc, dt, dA_cumsum, runs: torch.Tensor, initial_states=None,
                ends=None, factors=None, final_states=None, states_desc=None, starts=None, every: int = SUB_CHUNK) -> None:
    """Fills what out_desc and states_desc describe, and final_states, the last two where given.

    runs: (blocks, nruns, 6) int32. starts: a state every `every` tokens; runs begin there if they start from them.
    """
    stages = STAGES if states_desc is None else STAGES - 1  # states on their way out take the place of a stage
    launch(
        hopper_scan_kernel, runs.shape[0], x_desc, B_desc, C_desc, out_desc, states_desc, dA_cumsum, dt, contiguous(i.D),
        initial_states, ends, factors, final_states, starts, runs, runs.shape[1], dt.shape[2], i.nheads,
        i.nheads // i.ngroups, STAGES=stages, SLOTS=SLOTS, EVERY=every // dt.shape[3], num_warps=4, maxnreg=_REGISTERS)
