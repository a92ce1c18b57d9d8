"""hopper_states: the paper's chunk_state and state_passing in one kernel, forwards and backwards, in Gluon, for Hopper.

Equations (27) and (29) of docs/ssd.md: states, or gradients of states, without anything else. `walks` says what one block
walks. Roles:

    walk_slice (1 warpgroup a slice): S <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B
    fetch_tiles (1 warp):             B and x of both slices by TMA

A run starts as one of hopper_scan does, backwards from dfinal_states, and writes states (rows, nchunks, nheads, headdim,
dstate), that before the first of every EVERY sub-chunks (1 where rows are walked backwards), and, unless it is None,
final_states (batch, nheads, headdim, dstate) fp32: dinitial_states where rows are walked backwards.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ssd.runtime.gluon_names import async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .document_states import Entries, allocate_entry, as_box, as_tile
from .documents import TOKEN, Documents, get_run, load_field
from .early import may_begin_early, wait_for_last
from .ring import make_ring, mark_empty, slot_of
from .roles import (
    LOG2E,
    allocate_tiles,
    decay,
    get_head,
    load_steps,
    locate_state,
    make_form,
    split_pair,
    state_mask,
    store_masked,
)
from .scan_tiles import split_columns
from .start import add_pieces, load_given_state
from .walks import (
    SIZES,
    Work,
    add_step,
    count_stages,
    fetch_tiles,
    get_batch_row,
    get_sub_chunk,
    load_document,
    take_entering_state,
)
from .weights import pack_weights

# Of a thread at launch; the roles then share them out: 152 walk_slice of slice 1, 24 fetch_tiles, or 40 where documents have
# states; what is left, up to 256, walk_slice of slice 0.
_REGISTERS = 160


class Tiles(NamedTuple):
    """Shared memory: x and B by slot of the ring; states of each slice on their way out; the weights of its tokens."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64 or 128, 64]: both slices of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64 or 128, 64 or 128]
    states: gl.shared_memory_descriptor  # [2 or 4, 1, 64, 64 or 128], or None
    weights: gl.shared_memory_descriptor  # [4, 64 or 128] fp32, packed (`weights`): of two steps in turn


class WalkStart(NamedTuple):
    """What a run's first state is made of: a given state, of runs forwards or backwards, and pieces. Each may be None."""

    initial_states: gl.tensor
    dfinal_states: gl.tensor
    ends: gl.tensor
    factors: gl.tensor


@gluon.jit
def load_walk_start(start, run, bh, part, work, U: gl.constexpr, SLICE: gl.constexpr, BACKWARDS: gl.constexpr,
                    STATE: gl.constexpr, form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of the state before a run, or of the gradient of that after it."""
    if BACKWARDS and run.b >= work.forwards:
        state = load_given_state(start.dfinal_states, bh, STATE, SLICE, part, form, ROWS, WIDTH)
    else:
        state = load_given_state(start.initial_states, bh, STATE, SLICE, part, form, ROWS, WIDTH)
    return add_pieces(state, start.ends, start.factors, run, STATE, U, ROWS, WIDTH)


@gluon.jit
def fill_tile(desc, state, tiles, U: gl.constexpr, kept):
    """A state, or half of one, in slice U's tile number `kept`, in turn, once what left by it before has: a box of `desc`."""
    KEPT: gl.constexpr = tiles.shape[0] // 2
    out = U * KEPT + kept % KEPT
    store_wait(KEPT - 1)
    block_barrier()
    tile = tiles.index(out)
    as_tile(tile, desc).store(state.to(desc.dtype))
    fence_async_shared()
    block_barrier()
    return as_box(tile, desc)


@gluon.jit
def walk_slice(ring, entries, tiles, states_desc, dA_cumsum, dt, start, final_states, work, form: gl.constexpr, U: gl.constexpr,
               EVERY: gl.constexpr, BACKWARDS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The consumer warpgroup of slice U of a pair: S <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SLICE: gl.constexpr = U if form.SLICES == 2 else 0
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    step, entry, kept = 0, 0, 0
    if start.ends is None:
        wait_for_last()
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_run(work, k)
        b, first, last = run.b, run.first, run.last
        pair, part = split_pair(run.pair, form)
        h = get_head(pair, U, work.heads_per_group, form)
        bh = (get_batch_row(b, work, BACKWARDS) * work.nheads + h).to(gl.int64)
        row = bh * work.nsub * BLOCK_M
        state = load_walk_start(start, run, bh, part, work, U, SLICE, BACKWARDS, STATE, form, ROWS, WIDTH)
        if work.documents.blocks is not None:
            entered = load_document(get_sub_chunk(first, b, work, BACKWARDS), b, work, True, BACKWARDS)
        a, dt_c, end = load_steps(dA_cumsum, dt, row + get_sub_chunk(first, b, work, BACKWARDS) * BLOCK_M, m, BLOCK_M)
        for c in range(first, last):
            if work.documents.blocks is not None:
                # before the state, or they would wait for it
                next_block = get_sub_chunk(gl.minimum(c + 1, last - 1), b, work, BACKWARDS)
                next_entered = load_document(next_block, b, work, True, BACKWARDS)
                left = load_document(get_sub_chunk(c, b, work, BACKWARDS), b, work, False, BACKWARDS)
                if entered >= 0:
                    state = take_entering_state(b, entries, entry, work, BACKWARDS, STATE, U, ROWS, WIDTH)
            slot, line = slot_of(ring, step), 2 * U + step % 2
            w = dt_c * decay((end - a) * LOG2E)
            if BACKWARDS:
                w = gl.where(b >= work.forwards, decay(a * LOG2E), w)
            tiles.weights.index(line).store(pack_weights(w, tiles.x.dtype))
            factor = decay(end * LOG2E)
            ahead = get_sub_chunk(gl.minimum(c + 1, last - 1), b, work, BACKWARDS)
            a, dt_c, end = load_steps(dA_cumsum, dt, row + ahead * BLOCK_M, m, BLOCK_M)
            at = get_sub_chunk(c, b, work, BACKWARDS)
            if at % EVERY == 0:
                tile = fill_tile(states_desc, state, tiles.states, U, kept)
                chunk = b * ((work.nsub + EVERY - 1) // EVERY) + at // EVERY
                async_store(states_desc, [chunk * work.nheads + h, SLICE * ROWS, part * WIDTH], tile)
                kept += 1
            state = add_step(state, factor, ring, tiles, step, slot, line, STATE, U, BLOCK_M, ROWS, WIDTH)
            if work.documents.blocks is not None:
                if entered >= 0:
                    mark_empty(entries.ring, 0)
                    entry += 1
                entered = next_entered
                if work.documents.final_states is not None:  # noqa: SIM102
                    if left >= 0 and (not BACKWARDS or b >= work.forwards):
                        halves = split_columns(state)
                        for n in gl.static_range(2):
                            half = fill_tile(work.documents.final_states, halves[n], tiles.states, U, kept + n)
                            async_store(work.documents.final_states, [left * work.nheads + h, SLICE * ROWS,
                                                                      part * WIDTH + n * (WIDTH // 2)], half)
                        kept += 2
            step += 1
        if final_states is not None and work.documents.blocks is None:  # noqa: SIM102
            if last == work.nsub and (not BACKWARDS or b >= work.forwards):
                at = locate_state(final_states, bh, STATE, SLICE, part, form, ROWS, WIDTH)
                store_masked(at, state, state_mask(STATE, SLICE, part, form, ROWS, WIDTH))
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_states_kernel(x_desc, B_desc, dy_desc, C_desc, states_desc, dA_cumsum, dt, initial_states, dfinal_states,
                         ends, factors, final_states, runs, nruns, forwards, nsub, nheads, heads_per_group,
                         blocks, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, ODD: gl.constexpr, EVERY: gl.constexpr,
                         STAGES: gl.constexpr):
    BACKWARDS: gl.constexpr = dy_desc is not None
    gl.static_assert(EVERY == 1 or not BACKWARDS, "walks backwards keep the state of each sub-chunk")
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[-1]
    WIDTH: gl.constexpr = B_desc.block_shape[-1]
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, WIDTH, ODD)
    Xs = allocate_tiles(x_desc, 2 * STAGES)
    Bs = allocate_tiles(B_desc, STAGES)
    KEPT: gl.constexpr = 2 if states_desc.dtype.primitive_bitwidth == 16 else 1
    Ss = allocate_tiles(states_desc, 2 * KEPT)
    weights = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = make_ring(STAGES, 2)
    entries = Entries(None, None)
    if blocks is not None:
        Es = allocate_entry(ROWS, WIDTH)
        entries = Entries(Es, make_ring(1, 2))
    fence_async_shared()
    if blocks is None:
        documents = Documents(None, None, None, None, None)
        start = WalkStart(initial_states, dfinal_states, ends, factors)
    else:
        documents = Documents(blocks, load_field(blocks, nsub, TOKEN), initial_states, dfinal_states, final_states)
        start = WalkStart(None, None, ends, factors)
    tiles, work = Tiles(Xs, Bs, Ss, weights), Work(runs, nruns, forwards, nsub, nheads, heads_per_group, documents)
    gl.warp_specialize([
        (walk_slice, (ring, entries, tiles, states_desc, dA_cumsum, dt, start, final_states, work, FORM, 0, EVERY, BACKWARDS,
                      BLOCK_M, ROWS, WIDTH)),
        (walk_slice, (ring, entries, tiles, states_desc, dA_cumsum, dt, start, final_states, work, FORM, 1, EVERY, BACKWARDS,
                      BLOCK_M, ROWS, WIDTH)),
        (fetch_tiles, (x_desc, B_desc, dy_desc, C_desc, ring, entries, tiles, work, FORM, False, False, BACKWARDS)),
    ], [4, 1], [152, 24 if blocks is None else 40])


def hopper_states(i: SSDInputs, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states,
                  forwards: int, every: int, blocks=None) -> None:
    """Fills what states_desc describes, states every `every` tokens, and final_states unless None.

    descriptors: of x, B, and of dy, C if rows from `forwards` on are walked backwards; runs: (blocks, nruns, 6) int32.
    starts: initial_states and dfinal_states, contiguous, each or None for zeros. ends and factors: of the pieces that enter the
    runs, if any do. blocks: those of documents, in place of sub-chunks; starts and final_states are then descriptors of the
    documents', the last in tiles half as wide as a part.
    """
    launch(hopper_states_kernel, runs.shape[0], *(*descriptors, None, None)[:4], states_desc, dA_cumsum, dt, *starts, ends,
           factors, final_states, runs, runs.shape[1], forwards, dt.shape[2], i.nheads, i.nheads // i.ngroups, blocks,
           HEADDIM=i.headdim, DSTATE=i.dstate, ODD=i.nheads // i.ngroups % 2 == 1, EVERY=every // dt.shape[3],
           STAGES=count_stages(dt), num_warps=4, maxnreg=_REGISTERS, launch_pdl=may_begin_early(ends, blocks is None, *starts))
