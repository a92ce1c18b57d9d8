"""hopper_states, equations (27) and (29): states or gradients of states without anything else, in Gluon, for Hopper.

One block walks runs of sub-chunks of two heads (hopper_roles says what a run is) and reads x, B, dt and dA_cumsum as
hopper_scan does. Rows from `forwards` on are walked from the last sub-chunk to the first, with dy, C and exp(A_i) in the
places of x, B and dt_j exp(A_last - A_j): what is walked is then the gradient of the state.

    pieces:  a run starts from a zero state and writes ends (npieces, 2, 64, dstate) fp32, the state at its end, and factors
             (npieces, 2) fp32, the decay over it, in row `piece`: (28) joins them.
    states:  a run starts as one of hopper_scan does, backwards from dfinal_states, and writes states (rows, nchunks, nheads,
             64, dstate), that before the first of every EVERY sub-chunks (1 where rows are walked backwards), and, unless it
             is None, final_states (batch, nheads, 64, dstate) fp32: dinitial_states where rows are walked backwards.
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

from ssd.runtime.gluon_names import async_load, async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .roles import LOG2E, barriers, decay, entering_state, given_state, load_run, load_steps, state_offsets, tile

# One kernel for all sizes: what divides them, or that one is 1, is of no use to it.
SIZES = ("nruns", "forwards", "nsub", "nheads", "heads_per_group")
STAGES = 3
_REGISTERS = 160


@gluon.jit
def sub_chunk(c, b, nsub, forwards, BACKWARDS: gl.constexpr):
    """The sub-chunk at step c of a walk of row b."""
    if BACKWARDS:
        c = gl.where(b >= forwards, nsub - 1 - c, c)
    return c


@gluon.jit
def row_of(b, forwards, BACKWARDS: gl.constexpr):
    """The batch row that row b walks."""
    if BACKWARDS:
        b = gl.where(b >= forwards, b - forwards, b)
    return b


@gluon.jit
def walk(full, empty, Xs, Bs, Ss, weights, states_desc, dA_cumsum, dt, initial_states, dfinal_states, ends, factors,
         final_states, runs, nruns, forwards, nsub, nheads, U: gl.constexpr, EVERY: gl.constexpr, BACKWARDS: gl.constexpr,
         BLOCK_M: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """One warpgroup for each head: S <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B."""
    STAGES: gl.constexpr = full.shape[0]
    SIZE: gl.constexpr = HEADDIM * DSTATE
    DTYPE: gl.constexpr = Xs.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    offsets = state_offsets(STATE, HEADDIM, DSTATE)
    step = 0
    kept = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, piece, npieces = load_run(runs, k)
        h = pair * 2 + U
        bh = (row_of(b, forwards, BACKWARDS) * nheads + h).to(gl.int64)
        row = bh * nsub * BLOCK_M
        if states_desc is None:
            state = gl.zeros([HEADDIM, DSTATE], gl.float32, STATE)
        else:
            if BACKWARDS and b >= forwards:
                state = given_state(dfinal_states, bh, offsets, STATE, HEADDIM, DSTATE)
            else:
                state = given_state(initial_states, bh, offsets, STATE, HEADDIM, DSTATE)
            state = entering_state(state, ends, factors, piece, npieces, offsets, U, HEADDIM, DSTATE)
        total = 0.0
        a, dt_c, end = load_steps(dA_cumsum, dt, row + sub_chunk(first, b, nsub, forwards, BACKWARDS) * BLOCK_M, m, BLOCK_M)
        for c in range(first, last):
            stage, line = step % STAGES, 2 * U + step % 2
            w = dt_c * decay((end - a) * LOG2E)
            if BACKWARDS:
                w = gl.where(b >= forwards, decay(a * LOG2E), w)
            weights.index(line).store(w)
            total += end
            factor = decay(end * LOG2E)
            ahead = sub_chunk(gl.minimum(c + 1, last - 1), b, nsub, forwards, BACKWARDS)
            a, dt_c, end = load_steps(dA_cumsum, dt, row + ahead * BLOCK_M, m, BLOCK_M)
            if states_desc is not None:
                KEPT: gl.constexpr = Ss.shape[0] // 2
                at = sub_chunk(c, b, nsub, forwards, BACKWARDS)
                if at % EVERY == 0:
                    slot = U * KEPT + kept % KEPT
                    store_wait(KEPT - 1)
                    block_barrier()
                    tile(Ss, slot, HEADDIM, DSTATE).store(state.to(states_desc.dtype))
                    fence_async_shared()
                    block_barrier()
                    chunk = b * ((nsub + EVERY - 1) // EVERY) + at // EVERY
                    async_store(states_desc, [0, (chunk * nheads + h) * HEADDIM, 0], Ss.index(slot))
                    kept += 1
            block_barrier()
            w = gl.expand_dims(weights.index(line).load(gl.SliceLayout(0, OPERAND)), 0)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x = tile(Xs, 2 * stage + U, BLOCK_M, HEADDIM).permute((1, 0)).load(OPERAND)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            state = warpgroup_mma(x_end, tile(Bs, stage, BLOCK_M, DSTATE), state * factor, is_async=True)
            state = warpgroup_mma_wait(0, deps=(state,))
            block_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        if states_desc is None:
            if first < last:
                gl.store(ends + (piece * 2 + U).to(gl.int64) * SIZE + offsets, state)
                gl.store(factors + piece * 2 + U, decay(total * LOG2E))
        elif final_states is not None:  # noqa: SIM102
            if last == nsub and (not BACKWARDS or b >= forwards):
                gl.store(final_states + bh * SIZE + offsets, state)
    store_wait(0)


@gluon.jit
def fetch(x_desc, B_desc, dy_desc, C_desc, full, empty, Xs, Bs, runs, nruns, forwards, nsub, heads_per_group,
          BACKWARDS: gl.constexpr):
    """The producer: B and x of both heads of each sub-chunk into the next free stage; of walks backwards C and dy."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    step = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, _, _ = load_run(runs, k)
        p, n = pair * 2 * HEADDIM, pair * 2 // heads_per_group * DSTATE
        for c in range(first, last):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
            bar, token = full.index(stage), sub_chunk(c, b, nsub, forwards, BACKWARDS) * BLOCK_M
            mbarrier.expect(bar, BLOCK_M * 2 * (2 * HEADDIM + DSTATE))
            if BACKWARDS and b >= forwards:
                copy(dy_desc, C_desc, b - forwards, token, p, n, bar, Xs, Bs, stage)
            else:
                copy(x_desc, B_desc, b, token, p, n, bar, Xs, Bs, stage)
            step += 1


@gluon.jit
def copy(x_desc, B_desc, b, token, p, n, bar, Xs, Bs, stage):
    """B and x of two heads of one sub-chunk, from their columns n and p on."""
    async_load(B_desc, [b, token, n], bar, Bs.index(stage))
    for u in gl.static_range(2):
        async_load(x_desc, [b, token, p + u * x_desc.block_shape[2]], bar, Xs.index(2 * stage + u))


@gluon.jit(do_not_specialize=SIZES)
def hopper_states_kernel(x_desc, B_desc, dy_desc, C_desc, states_desc, dA_cumsum, dt, initial_states, dfinal_states,
                         ends, factors, final_states, runs, nruns, forwards, nsub, nheads, heads_per_group, EVERY: gl.constexpr,
                         STAGES: gl.constexpr):
    BACKWARDS: gl.constexpr = dy_desc is not None
    gl.static_assert(EVERY == 1 or not BACKWARDS, "walks backwards keep the state of each sub-chunk")
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    Xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_M, HEADDIM], x_desc.layout)
    Bs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_M, DSTATE], B_desc.layout)
    if states_desc is None:
        Ss: gl.constexpr = None
    else:
        KEPT: gl.constexpr = 2 if states_desc.dtype.primitive_bitwidth == 16 else 1
        Ss = gl.allocate_shared_memory(states_desc.dtype, [2 * KEPT, 1, HEADDIM, DSTATE], states_desc.layout)
    weights = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (walk, (full, empty, Xs, Bs, Ss, weights, states_desc, dA_cumsum, dt, initial_states, dfinal_states, ends, factors,
                final_states, runs, nruns, forwards, nsub, nheads, 0, EVERY, BACKWARDS, BLOCK_M, HEADDIM, DSTATE)),
        (walk, (full, empty, Xs, Bs, Ss, weights, states_desc, dA_cumsum, dt, initial_states, dfinal_states, ends, factors,
                final_states, runs, nruns, forwards, nsub, nheads, 1, EVERY, BACKWARDS, BLOCK_M, HEADDIM, DSTATE)),
        (fetch, (x_desc, B_desc, dy_desc, C_desc, full, empty, Xs, Bs, runs, nruns, forwards, nsub, heads_per_group,
                 BACKWARDS)),
    ], [4, 1], [152, 24])


def piece_states(i: SSDInputs, descriptors, dt, dA_cumsum, npieces: int, runs,
                 forwards: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ends and factors. descriptors: of x, B, and of dy, C if rows from `forwards` on are walked backwards.

    runs: (blocks, nruns, 6) int32.
    """
    ends = torch.empty(npieces, 2, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    factors = torch.empty(npieces, 2, device=i.x.device, dtype=torch.float32)
    _launch(i, descriptors, None, dt, dA_cumsum, runs, (None, None), ends, factors, None, forwards, dt.shape[3])
    return ends, factors


def all_states(i: SSDInputs, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards: int,
               every: int) -> None:
    """Fills what states_desc describes, states every `every` tokens, and final_states unless None.

    descriptors, runs: as above. starts: initial_states and dfinal_states, contiguous, each or None for zeros. ends and factors:
    of the pieces that enter the runs, if any do.
    """
    _launch(i, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards, every)


def _launch(i: SSDInputs, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards: int,
            every: int) -> None:
    descriptors = (*descriptors, None, None)[:4]
    launch(hopper_states_kernel, runs.shape[0], *descriptors, states_desc, dA_cumsum, dt, *starts, ends, factors, final_states,
           runs, runs.shape[1], forwards, dt.shape[2], i.nheads, i.nheads // i.ngroups,
           EVERY=every // dt.shape[3], STAGES=STAGES, num_warps=4, maxnreg=_REGISTERS)
