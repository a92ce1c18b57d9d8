"""hopper_states, equation (27): the states without the outputs, in Gluon, for Hopper.

One block walks runs of sub-chunks of two heads and reads x, B, dt and dA_cumsum as hopper_scan does. Two uses:

    pieces:  a run starts from a zero state and writes ends (npieces, 2, 64, dstate) fp32, the state at its end, and factors
             (npieces, 2) fp32, the decay over it, in row `piece`: (28) joins them.
    states:  a run starts as one of hopper_scan does and writes prev_states (batch, nchunks, nheads, 64, dstate), a state every
             EVERY sub-chunks, and final_states (batch, nheads, 64, dstate) fp32.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..types import SSDInputs
from .hopper_roles import (
    LOG2E,
    barriers,
    block_barrier,
    decay,
    entering_state,
    fetch,
    keep_state,
    load_run,
    load_steps,
    state_offsets,
    tile,
)
from .launch import launch

STAGES = 3
_REGISTERS = 160


@gluon.jit
def add_up(full, empty, Xs, Bs, to_end, dA_cumsum, dt, initial_states, ends, factors, prev_states, final_states, runs, nruns,
           nsub, nheads, U: gl.constexpr, EVERY: gl.constexpr, BLOCK_M: gl.constexpr, HEADDIM: gl.constexpr,
           DSTATE: gl.constexpr):
    """One warpgroup for each head: S <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B."""
    STAGES: gl.constexpr = full.shape[0]
    DTYPE: gl.constexpr = Xs.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    offsets = state_offsets(STATE, HEADDIM, DSTATE)
    step = 0
    for k in range(gl.program_id(0) * nruns, gl.program_id(0) * nruns + nruns):
        b, pair, first, last, piece, npieces = load_run(runs, k)
        h = pair * 2 + U
        bh = (b * nheads + h).to(gl.int64)
        row = bh * nsub * BLOCK_M
        if prev_states is None:
            state = gl.zeros([HEADDIM, DSTATE], gl.float32, STATE)
        else:
            state = entering_state(initial_states, ends, factors, bh, piece, npieces, offsets, U, STATE, HEADDIM, DSTATE)
        total = 0.0
        a, dt_c, end = load_steps(dA_cumsum, dt, row + first * BLOCK_M, m, BLOCK_M)
        for c in range(first, last):
            stage, line = step % STAGES, 2 * U + step % 2
            if prev_states is not None:
                keep_state(state, prev_states, b, h, c, nsub, nheads, EVERY, HEADDIM, DSTATE)
            to_end.index(line).store(dt_c * decay((end - a) * LOG2E))
            total += end
            factor = gl.exp2(end * LOG2E)
            a, dt_c, end = load_steps(dA_cumsum, dt, row + gl.minimum(c + 1, last - 1) * BLOCK_M, m, BLOCK_M)
            block_barrier()
            w = gl.expand_dims(to_end.index(line).load(gl.SliceLayout(0, OPERAND)), 0)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x = tile(Xs, 2 * stage + U, BLOCK_M, HEADDIM).permute((1, 0)).load(OPERAND)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            state = warpgroup_mma(x_end, tile(Bs, stage, BLOCK_M, DSTATE), state * factor, is_async=True)
            state = warpgroup_mma_wait(0, deps=(state,))
            block_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        if prev_states is not None:
            if last == nsub:
                gl.store(final_states + bh * HEADDIM * DSTATE + offsets, state)
        elif first < last:
            gl.store(ends + (piece * 2 + U).to(gl.int64) * HEADDIM * DSTATE + offsets, state)
            gl.store(factors + piece * 2 + U, gl.exp2(total * LOG2E))


@gluon.jit
def hopper_states_kernel(x_desc, B_desc, dA_cumsum, dt, initial_states, ends, factors, prev_states, final_states, runs, nruns,
                         nsub, nheads, heads_per_group, EVERY: gl.constexpr, STAGES: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    Xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_M, HEADDIM], x_desc.layout)
    Bs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_M, DSTATE], B_desc.layout)
    to_end = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (add_up, (full, empty, Xs, Bs, to_end, dA_cumsum, dt, initial_states, ends, factors, prev_states, final_states, runs,
                  nruns, nsub, nheads, 0, EVERY, BLOCK_M, HEADDIM, DSTATE)),
        (add_up, (full, empty, Xs, Bs, to_end, dA_cumsum, dt, initial_states, ends, factors, prev_states, final_states, runs,
                  nruns, nsub, nheads, 1, EVERY, BLOCK_M, HEADDIM, DSTATE)),
        (fetch, (x_desc, B_desc, B_desc, full, empty, Xs, Bs, Bs, runs, nruns, heads_per_group, False)),
    ], [4, 1], [152, 24])


def piece_states(i: SSDInputs, x_desc, B_desc, dt, dA_cumsum, npieces: int, runs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ends and factors. runs: (blocks, nruns, 6) int32."""
    ends = torch.empty(npieces, 2, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    factors = torch.empty(npieces, 2, device=i.x.device, dtype=torch.float32)
    _launch(i, x_desc, B_desc, dt, dA_cumsum, runs, None, ends, factors, None, None)
    return ends, factors


def all_states(i: SSDInputs, x_desc, B_desc, dt, dA_cumsum, runs, initial_states, ends, factors, prev_states,
               final_states) -> None:
    """Fills prev_states and final_states. ends and factors: of the pieces that enter the runs, if any do."""
    _launch(i, x_desc, B_desc, dt, dA_cumsum, runs, initial_states, ends, factors, prev_states, final_states)


def _launch(i: SSDInputs, x_desc, B_desc, dt, dA_cumsum, runs, *states) -> None:
    launch(hopper_states_kernel, runs.shape[0], x_desc, B_desc, dA_cumsum, dt, *states, runs, runs.shape[1], dt.shape[2],
           i.nheads, i.nheads // i.ngroups, EVERY=i.chunk_size // dt.shape[3], STAGES=STAGES, num_warps=4, maxnreg=_REGISTERS)
