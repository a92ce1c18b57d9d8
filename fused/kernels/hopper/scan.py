"""hopper_scan: the paper's bmm_chunk, chunk_state, state_passing and chunk_scan in one kernel, in Gluon, for Hopper.

Equations (26) to (28) of docs/ssd.md. A block holds the states S of two neighbouring heads of one group in registers and walks
runs of sub-chunks of 64 tokens (`roles` says what a run is). A role is a group of warps with one job. Everything is transposed
against (26), so that S and x are wgmma's operand in registers, and only B, C and L pass through shared memory:

    make_masks (1 warpgroup):       L_h = (B C^T) exp(A_i - A_j) dt_j for i >= j, [j, i], for both heads from one B C^T
    scan_head (1 warpgroup a head): y^T = (S C^T) exp(A_i) + x^T L + D x^T
                                    S  <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B
    fetch_tiles (1 warp):           B, C and x of both heads by TMA

with i, j tokens of the sub-chunk, A = dA_cumsum, y [i, headdim], S [headdim, dstate]. Two rings connect the roles: `tiles`,
which fetch_tiles fills and the other three read, and `masks`, a lane a head, which make_masks fills and scan_head reads.

Reads x (batch, seqlen, nheads, 64), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, channels and heads contiguous,
through TMA descriptors that fill rows past seqlen with 0; dt, dA_cumsum (batch, nheads, nsub, 64) fp32, dA_cumsum restarting
every sub-chunk; D (nheads,); initial_states (batch, nheads, 64, dstate); ends, factors as hopper_states writes them.
Writes out as x, final_states (batch, nheads, 64, dstate) fp32, and the state before every sub-chunk, (batch, nsub, nheads, 64,
dstate); or starts each run from one of `starts`, such states of every EVERY sub-chunks.
"""

from typing import NamedTuple

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

from .ring import Ring, make_ring, mark_empty, mark_full, slot_of, wait_empty, wait_full
from .roles import (
    LOG2E,
    add_pieces,
    decay,
    get_tile,
    load_given_state,
    load_run,
    load_steps,
    log2,
    row_layout,
    state_offsets,
)

# One kernel for all sizes: that a size is 1 or divisible by 16 would not make it faster.
SIZES = ("nruns", "nsub", "nheads", "heads_per_group")
STAGES, SLOTS = 3, 2  # slots of the ring of tiles; of the ring of masks, for each head
_REGISTERS = 128  # of a thread at launch; the roles then share them out: 192 scan_head, 104 make_masks, 24 fetch_tiles


class Rings(NamedTuple):
    """Which slots of shared memory are full or empty."""

    tiles: Ring
    masks: Ring  # a lane a head


class Tiles(NamedTuple):
    """Shared memory, by slot: x, B, C of `tiles`, L of `masks`; y and states, a slot a head, on their way out."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64, headdim]: both heads of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64, dstate], and C
    C: gl.shared_memory_descriptor
    L: gl.shared_memory_descriptor  # [2 SLOTS, 64, 64]
    y: gl.shared_memory_descriptor  # [2, 1, 64, headdim]
    states: gl.shared_memory_descriptor  # [2, 1, headdim, dstate], or None


class Vectors(NamedTuple):
    """Shared memory [2 SLOTS, 64] fp32, by slot of `masks`: the decays of a head's tokens."""

    from_start: gl.shared_memory_descriptor  # exp(A_i)
    to_end: gl.shared_memory_descriptor  # dt_j exp(A_last - A_j)


class Work(NamedTuple):
    """The runs of all blocks, nruns of them for each, and the sizes that tell where a head's tokens are."""

    runs: gl.tensor
    nruns: gl.tensor
    nsub: gl.tensor
    nheads: gl.tensor


class Start(NamedTuple):
    """Where a run's first state comes from: `starts`, or initial_states and the pieces before it. Each may be None."""

    initial_states: gl.tensor
    ends: gl.tensor
    factors: gl.tensor
    starts: gl.tensor


@gluon.jit
def and_bits(a, b):
    """Bitwise and of two tensors of 16-bit elements, two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, True, 2)


@gluon.jit
def load_kept_state(starts, b, h, c, work, EVERY: gl.constexpr, STATE: gl.constexpr, HEADDIM: gl.constexpr,
                    DSTATE: gl.constexpr):
    """The state before the chunk of sub-chunk c, [P, N] fp32."""
    ROWS: gl.constexpr = row_layout(DSTATE)
    row = (b * ((work.nsub + EVERY - 1) // EVERY) + c // EVERY).to(gl.int64) * work.nheads + h
    at = row * HEADDIM * DSTATE + state_offsets(ROWS, HEADDIM, DSTATE)
    return gl.convert_layout(gl.load(starts + at), STATE).to(gl.float32)


@gluon.jit
def load_start(start, run, h, bh, offsets, work, U: gl.constexpr, EVERY: gl.constexpr, STATE: gl.constexpr,
               HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """The state before a run of head h, [P, N] fp32."""
    if start.starts is not None:
        state = load_kept_state(start.starts, run.b, h, run.first, work, EVERY, STATE, HEADDIM, DSTATE)
    else:
        state = load_given_state(start.initial_states, bh, offsets, STATE, HEADDIM, DSTATE)
        state = add_pieces(state, start.ends, start.factors, run, offsets, U, HEADDIM, DSTATE)
    return state


@gluon.jit
def fetch_tiles(x_desc, B_desc, C_desc, ring, tiles, work, heads_per_group):
    """The producer: B, C and x of both heads of each sub-chunk into the next free slot."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    BYTES: gl.constexpr = BLOCK_M * 2 * (2 * HEADDIM + 2 * DSTATE)
    step = 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = load_run(work.runs, k)
        h, g = run.pair * 2, run.pair * 2 // heads_per_group
        for c in range(run.first, run.last):
            slot = slot_of(ring, step)
            wait_empty(ring, step)
            bar = ring.full.index(slot)
            mbarrier.expect(bar, BYTES)
            async_load(B_desc, [run.b, c * BLOCK_M, g * DSTATE], bar, tiles.B.index(slot))
            async_load(C_desc, [run.b, c * BLOCK_M, g * DSTATE], bar, tiles.C.index(slot))
            for u in gl.static_range(2):
                async_load(x_desc, [run.b, c * BLOCK_M, (h + u) * HEADDIM], bar, tiles.x.index(2 * slot + u))
            step += 1


@gluon.jit
def make_masks(rings, tiles, vectors, A_rows, A_columns, dA_cumsum, dt, work, BLOCK_M: gl.constexpr, DSTATE: gl.constexpr):
    """The consumer warpgroup that makes L and the vectors of both heads.

    dt_j is in the exponent of L as log2(dt_j). That exponent cannot be clamped at 0: where A falls by more than 1e7 in a
    sub-chunk, fp32 sums of it are no longer monotone, and L may overflow. A_rows, A_columns [2, 64] fp32 in shared memory turn
    a vector of a head into rows and columns of L: A_j - log2(dt_j) and A_i.
    """
    DTYPE: gl.constexpr = tiles.B.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    j, i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, JI)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, JI))
    # all bits of an element or none: one instruction then masks two elements, whatever exp2 made of those above the diagonal
    causal = gl.where(gl.expand_dims(i, 0) >= gl.expand_dims(j, 1), -1, 0).to(gl.int16).to(DTYPE, bitcast=True)
    step = 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = load_run(work.runs, k)
        first, last = run.first, run.last
        row = (run.b * work.nheads + run.pair * 2).to(gl.int64) * work.nsub * BLOCK_M
        other = work.nsub * BLOCK_M  # from a head's row to the next one's
        a0, dt0, end0 = load_steps(dA_cumsum, dt, row + first * BLOCK_M, m, BLOCK_M)
        a1, dt1, end1 = load_steps(dA_cumsum, dt, row + other + first * BLOCK_M, m, BLOCK_M)
        for c in range(first, last):
            slot = slot_of(rings.tiles, step)
            wait_full(rings.tiles, step)
            B, C = get_tile(tiles.B, slot, BLOCK_M, DSTATE), get_tile(tiles.C, slot, BLOCK_M, DSTATE)
            BC = warpgroup_mma(B, C.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI), use_acc=False, is_async=True)
            for u in gl.static_range(2):
                wait_empty(rings.masks, step, u, 2)
            for u in gl.static_range(2):
                a, dt_u, end = (a0 if u == 0 else a1) * LOG2E, dt0 if u == 0 else dt1, (end0 if u == 0 else end1) * LOG2E
                A_columns.index(u).store(a)
                A_rows.index(u).store(a - log2(dt_u))
                vectors.from_start.index(slot_of(rings.masks, step, u, 2)).store(gl.exp2(a))
                vectors.to_end.index(slot_of(rings.masks, step, u, 2)).store(dt_u * decay(end - a))
            # the next sub-chunk's, into the same registers: a load into others would wait here for itself
            ahead = row + gl.minimum(c + 1, last - 1) * BLOCK_M
            a0, dt0, end0 = load_steps(dA_cumsum, dt, ahead, m, BLOCK_M)
            a1, dt1, end1 = load_steps(dA_cumsum, dt, ahead + other, m, BLOCK_M)
            block_barrier()
            BC = warpgroup_mma_wait(0, deps=(BC,))
            mark_empty(rings.tiles, slot)
            for u in gl.static_range(2):
                A_i, A_j = A_columns.index(u).load(gl.SliceLayout(0, JI)), A_rows.index(u).load(gl.SliceLayout(1, JI))
                L = (BC * gl.exp2(gl.expand_dims(A_i, 0) - gl.expand_dims(A_j, 1))).to(DTYPE)
                tiles.L.index(slot_of(rings.masks, step, u, 2)).store(and_bits(L, causal))
                fence_async_shared()
                block_barrier()
                mark_full(rings.masks, slot_of(rings.masks, step, u, 2))
            step += 1


@gluon.jit
def scan_head(out_desc, states_desc, rings, tiles, vectors, dA_cumsum, D, start, final_states, work, U: gl.constexpr,
              EVERY: gl.constexpr, DSTATE: gl.constexpr):
    """The consumer warpgroup of head 2 pair + U: its state and its output."""
    BLOCK_M: gl.constexpr = out_desc.block_shape[1]
    HEADDIM: gl.constexpr = out_desc.block_shape[2]
    SIZE: gl.constexpr = HEADDIM * DSTATE
    DTYPE: gl.constexpr = tiles.x.dtype
    PI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # y^T
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PI, 2)
    offsets = state_offsets(STATE, HEADDIM, DSTATE)
    step = 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = load_run(work.runs, k)
        b, first, last = run.b, run.first, run.last
        h = run.pair * 2 + U
        bh = (b * work.nheads + h).to(gl.int64)
        state = load_start(start, run, h, bh, offsets, work, U, EVERY, STATE, HEADDIM, DSTATE)
        A_last = dA_cumsum + bh * work.nsub * BLOCK_M + BLOCK_M - 1
        end = gl.load(A_last + first * BLOCK_M)
        if D is not None:
            D_h = gl.load(D + h).to(gl.float32)
        for c in range(first, last):
            slot, mask = slot_of(rings.tiles, step), slot_of(rings.masks, step, U, 2)
            if states_desc is not None:
                # the wait for the store of y, below, was one for that of the last state too
                get_tile(tiles.states, U, HEADDIM, DSTATE).store(state.to(states_desc.dtype))
                fence_async_shared()
                block_barrier()
                async_store(states_desc, [0, ((b * work.nsub + c) * work.nheads + h) * HEADDIM, 0], tiles.states.index(U))
            wait_full(rings.tiles, step)
            B, C = get_tile(tiles.B, slot, BLOCK_M, DSTATE), get_tile(tiles.C, slot, BLOCK_M, DSTATE)
            x_t = get_tile(tiles.x, 2 * slot + U, BLOCK_M, HEADDIM).permute((1, 0))
            x = x_t.load(OPERAND)
            S = gl.convert_layout(state.to(DTYPE), OPERAND)
            state = state * gl.exp2(end * LOG2E)
            wait_full(rings.masks, step, U, 2)
            w = gl.expand_dims(vectors.to_end.index(mask).load(gl.SliceLayout(0, OPERAND)), 0)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            end = gl.load(A_last + gl.minimum(c + 1, last - 1) * BLOCK_M)
            # both products in flight before anything else touches an accumulator: ptxas would insert a wait
            y = gl.zeros([HEADDIM, BLOCK_M], gl.float32, PI)
            y = warpgroup_mma(S, C.permute((1, 0)), y, use_acc=False, is_async=True)  # [P, N] @ [N, M]
            state = warpgroup_mma(x_end, B, state, is_async=True)  # [P, M] @ [M, N]
            w = gl.expand_dims(vectors.from_start.index(mask).load(gl.SliceLayout(0, PI)), 0)
            y = warpgroup_mma_wait(1, deps=(y,)) * w
            y = warpgroup_mma(x, tiles.L.index(mask), y, is_async=True)  # [P, M] @ [M, M]
            state, y = warpgroup_mma_wait(0, deps=(state, y))
            if D is not None:
                y += D_h * x_t.load(PI).to(gl.float32)  # read again: x as fp32 does not fit beside the accumulators
            store_wait(0)
            block_barrier()
            mark_empty(rings.masks, mask)
            get_tile(tiles.y, U, BLOCK_M, HEADDIM).permute((1, 0)).store(y.to(DTYPE))
            fence_async_shared()
            block_barrier()
            # not before y is there: a load from x that is only on its way would find the next tile (docs/log/hopper-scan.md)
            mark_empty(rings.tiles, slot)
            async_store(out_desc, [b, c * BLOCK_M, h * HEADDIM], tiles.y.index(U))
            step += 1
        if final_states is not None and last == work.nsub:
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
    rings = Rings(make_ring(STAGES, 3), make_ring(2 * SLOTS, 1))
    fence_async_shared()
    tiles, vectors = Tiles(Xs, Bs, Cs, Ls, Ys, Ss), Vectors(from_start, to_end)
    work, start = Work(runs, nruns, nsub, nheads), Start(initial_states, ends, factors, starts)
    gl.warp_specialize([
        (scan_head, (out_desc, states_desc, rings, tiles, vectors, dA_cumsum, D, start, final_states, work, 0, EVERY, DSTATE)),
        (scan_head, (out_desc, states_desc, rings, tiles, vectors, dA_cumsum, D, start, final_states, work, 1, EVERY, DSTATE)),
        (make_masks, (rings, tiles, vectors, A_rows, A_columns, dA_cumsum, dt, work, BLOCK_M, DSTATE)),
        (fetch_tiles, (x_desc, B_desc, C_desc, rings.tiles, tiles, work, heads_per_group)),
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
