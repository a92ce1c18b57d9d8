"""hopper_states: the paper's chunk_state and state_passing in one kernel, forwards and backwards, in Gluon, for Hopper.

Equations (27) and (29) of docs/ssd.md: states, or gradients of states, without anything else. One block walks runs of
sub-chunks, or of spans where dt is of 128 tokens, of two heads (`roles` says what a run is; with two parts of dstate, a run's
pair is 2 pair + part) and reads x, B, dt and dA_cumsum as hopper_scan does. Rows from `forwards` on are walked from the last
sub-chunk to the first, with dy, C and exp(A_i) in the places of x, B and dt_j exp(A_last - A_j): then the gradient of the state
is what is computed. Roles:

    walk_slice (1 warpgroup a slice): S <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B
    fetch_tiles (1 warp):             B and x of both heads by TMA

The kernel does one of two things:

    pieces:  a run starts from a zero state and writes ends (npieces, 2, 64, dstate) fp32, the state at its end, and
             factors (npieces, 2) fp32, the decay over it, in row `piece`: (28) joins them.
    states:  a run starts as one of hopper_scan does, backwards from dfinal_states, and writes states (rows, nchunks, nheads,
             headdim, dstate), that before the first of every EVERY sub-chunks (1 where rows are walked backwards), and, unless
             it is None, final_states (batch, nheads, headdim, dstate) fp32: dinitial_states where rows are walked backwards.
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

from ssd.runtime.gluon_names import async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SUB_CHUNK, SSDInputs

from .document_states import Entries, as_box, as_tile, fetch_document_states, take_document_state
from .documents import BEGUN, ENDED, FIRST_BLOCK, LAST_BLOCK, TOKEN, Documents, get_run, is_run, load_field
from .early import let_next_begin, may_begin_early
from .ring import make_ring, mark_empty, slot_of, wait_empty, wait_full
from .roles import (
    LOG2E,
    Run,
    allocate_tiles,
    decay,
    fetch_slice,
    get_head,
    get_tile,
    load_steps,
    locate_state,
    make_form,
    split_pair,
    state_mask,
    store_masked,
    tile_bytes,
)
from .scan_tiles import split_columns
from .start import add_pieces, load_given_state, locate_end

# One kernel for all sizes: that a size is 1 or divisible by 16 would not make it faster.
SIZES = ("nruns", "forwards", "nsub", "nheads", "heads_per_group")
STAGES = 3  # of sub-chunks, or 2 of spans
# Of a thread at launch; the roles then share them out: 152 walk_slice of slice 1, or 224 where tiles have 256 states; 24
# fetch_tiles, or 40 where documents have states; what is left, up to 256, walk_slice of slice 0.
_REGISTERS = 160


class Tiles(NamedTuple):
    """Shared memory: x and B by slot of the ring; states of each head on their way out; the weights of each head's tokens."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64 or 128, headdim]: both heads of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64 or 128, dstate]
    states: gl.shared_memory_descriptor  # [2 or 4, 1, headdim, dstate], or None
    weights: gl.shared_memory_descriptor  # [4, 64 or 128] fp32: of two steps in turn


class Work(NamedTuple):
    """The runs of all blocks, nruns of them for each, and sizes. Rows from `forwards` on are walked backwards."""

    runs: gl.tensor
    nruns: gl.tensor
    forwards: gl.tensor
    nsub: gl.tensor
    nheads: gl.tensor
    heads_per_group: gl.tensor
    documents: Documents


class Start(NamedTuple):
    """What a run's first state is made of: a given state, of runs forwards or backwards, and pieces. Each may be None."""

    initial_states: gl.tensor
    dfinal_states: gl.tensor
    ends: gl.tensor
    factors: gl.tensor


@gluon.jit
def get_sub_chunk(c, b, work, BACKWARDS: gl.constexpr):
    """The sub-chunk at step c of a walk of row b."""
    if BACKWARDS:
        if work.documents.blocks is None:
            c = gl.where(b >= work.forwards, work.nsub - 1 - c, c)
        else:
            c = gl.where(b >= work.forwards, work.documents.total - 1 - c, c)
    return c


@gluon.jit
def get_batch_row(b, work, BACKWARDS: gl.constexpr):
    """The batch row that row b walks."""
    if BACKWARDS:
        b = gl.where(b >= work.forwards, b - work.forwards, b)
    return b


@gluon.jit
def get_token(c, b, work, BLOCK_M: gl.constexpr, BACKWARDS: gl.constexpr):
    """The first token at step c of a walk of row b."""
    c = get_sub_chunk(c, b, work, BACKWARDS)
    return c * BLOCK_M if work.documents.blocks is None else load_field(work.documents.blocks, c, TOKEN)


@gluon.jit
def load_document(c, b, work, ENTERED: gl.constexpr, BACKWARDS: gl.constexpr):
    """The document that a walk of row b enters at block c, or else leaves there; -1 if there is none."""
    document = load_field(work.documents.blocks, c, BEGUN if ENTERED else ENDED)
    if BACKWARDS:
        other = load_field(work.documents.blocks, c, ENDED if ENTERED else BEGUN)
        document = gl.where(b >= work.forwards, other, document)
    return document


@gluon.jit
def get_walk(work, k, PIECES: gl.constexpr, BACKWARDS: gl.constexpr):
    """Run k. A piece begins where its walk enters the last of its documents, since nothing before that reaches its end."""
    run = get_run(work, k)
    if PIECES and work.documents.blocks is not None:
        c = get_sub_chunk(gl.where(run.last > 0, run.last - 1, 0), run.b, work, BACKWARDS)
        entry = load_field(work.documents.blocks, c, FIRST_BLOCK)
        if BACKWARDS:
            last_block = load_field(work.documents.blocks, c, LAST_BLOCK)
            entry = gl.where(run.b >= work.forwards, work.documents.total - 1 - last_block, entry)
        run = Run(run.b, run.pair, gl.where(entry > run.first, entry, run.first), run.last, run.piece, run.npieces)
    return run


@gluon.jit
def fetch_entering_states(c, b, pair, entries, entry, work, form: gl.constexpr, BACKWARDS: gl.constexpr):
    """At step c of a walk of row b, the states of the document that it enters, if it does; returns the next entry's number."""
    entered = load_document(get_sub_chunk(c, b, work, BACKWARDS), b, work, True, BACKWARDS)
    if entered >= 0:
        if BACKWARDS and b >= work.forwards:
            fetch_document_states(work.documents.dfinal_states, entered, pair, entries, entry, work, form)
        else:
            fetch_document_states(work.documents.initial_states, entered, pair, entries, entry, work, form)
        entry += 1
    return entry


@gluon.jit
def take_entering_state(b, entries, entry, work, BACKWARDS: gl.constexpr, STATE: gl.constexpr, U: gl.constexpr,
                        ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of the state of that document, or of the gradient of the one that it leaves."""
    if BACKWARDS and b >= work.forwards:
        state = take_document_state(work.documents.dfinal_states, entries, entry, STATE, U, ROWS, WIDTH)
    else:
        state = take_document_state(work.documents.initial_states, entries, entry, STATE, U, ROWS, WIDTH)
    return state


@gluon.jit
def load_start(start, run, bh, part, work, U: gl.constexpr, SLICE: gl.constexpr, BACKWARDS: gl.constexpr, STATE: gl.constexpr,
               form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
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
    DTYPE: gl.constexpr = tiles.x.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    SLICE: gl.constexpr = U if form.SLICES == 2 else 0
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    step, entry, kept = 0, 0, 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_walk(work, k, states_desc is None, BACKWARDS)
        b, first, last = run.b, run.first, run.last
        pair, part = split_pair(run.pair, form)
        h = get_head(pair, U, work.heads_per_group, form)
        bh = (get_batch_row(b, work, BACKWARDS) * work.nheads + h).to(gl.int64)
        row = bh * work.nsub * BLOCK_M
        if states_desc is None:
            state = gl.zeros([ROWS, WIDTH], gl.float32, STATE)
        else:
            state = load_start(start, run, bh, part, work, U, SLICE, BACKWARDS, STATE, form, ROWS, WIDTH)
        total = 0.0
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
                    total = -1e30  # what came before is not in it
            slot, line = slot_of(ring, step), 2 * U + step % 2
            w = dt_c * decay((end - a) * LOG2E)
            if BACKWARDS:
                w = gl.where(b >= work.forwards, decay(a * LOG2E), w)
            tiles.weights.index(line).store(w)
            total += end
            factor = decay(end * LOG2E)
            ahead = get_sub_chunk(gl.minimum(c + 1, last - 1), b, work, BACKWARDS)
            a, dt_c, end = load_steps(dA_cumsum, dt, row + ahead * BLOCK_M, m, BLOCK_M)
            if states_desc is not None:
                at = get_sub_chunk(c, b, work, BACKWARDS)
                if at % EVERY == 0:
                    tile = fill_tile(states_desc, state, tiles.states, U, kept)
                    chunk = b * ((work.nsub + EVERY - 1) // EVERY) + at // EVERY
                    async_store(states_desc, [chunk * work.nheads + h, SLICE * ROWS, part * WIDTH], tile)
                    kept += 1
            block_barrier()
            w = gl.expand_dims(tiles.weights.index(line).load(gl.SliceLayout(0, OPERAND)), 0)
            wait_full(ring, step)
            x = get_tile(tiles.x, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0)).load(OPERAND)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            B = get_tile(tiles.B, slot, BLOCK_M, WIDTH)
            state = warpgroup_mma(x_end, B, state * factor, is_async=True)  # [P, M] @ [M, N]
            state = warpgroup_mma_wait(0, deps=(state,))
            block_barrier()
            mark_empty(ring, slot)
            if work.documents.blocks is not None:
                if entered >= 0:  # not before the product, which is the first to use the state where none are kept
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
        if states_desc is None:
            if is_run(work, k, run):
                piece = run.piece * 2 + U
                gl.store(locate_end(start.ends, piece, STATE, ROWS, WIDTH, WIDTH), state)
                gl.store(start.factors + piece, decay(total * LOG2E))
        elif final_states is not None and work.documents.blocks is None:  # noqa: SIM102
            if last == work.nsub and (not BACKWARDS or b >= work.forwards):
                at = locate_state(final_states, bh, STATE, SLICE, part, form, ROWS, WIDTH)
                store_masked(at, state, state_mask(STATE, SLICE, part, form, ROWS, WIDTH))
    store_wait(0)


@gluon.jit
def fetch_tiles(x_desc, B_desc, dy_desc, C_desc, ring, entries, tiles, work, form: gl.constexpr, PIECES: gl.constexpr,
                BACKWARDS: gl.constexpr):
    """The producer: B and x of both heads of each sub-chunk into the next free slot; of walks backwards C and dy."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = 2 * tile_bytes(x_desc) + tile_bytes(B_desc)
    step, entry = 0, 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_walk(work, k, PIECES, BACKWARDS)
        b = run.b
        for c in range(run.first, run.last):
            if work.documents.blocks is not None:
                token = get_token(c, b, work, BLOCK_M, BACKWARDS)
                entry = fetch_entering_states(c, b, run.pair, entries, entry, work, form, BACKWARDS)
            slot = slot_of(ring, step)
            wait_empty(ring, step)
            bar = ring.full.index(slot)
            if work.documents.blocks is None:
                token = get_token(c, b, work, BLOCK_M, BACKWARDS)
            mbarrier.expect(bar, BYTES)
            if BACKWARDS and b >= work.forwards:
                fetch_pair(dy_desc, C_desc, b - work.forwards, token, run.pair, work, form, bar, tiles, slot)
            else:
                fetch_pair(x_desc, B_desc, b, token, run.pair, work, form, bar, tiles, slot)
            step += 1


@gluon.jit
def fetch_pair(x_desc, B_desc, b, token, pair, work, form: gl.constexpr, bar, tiles, slot):
    """Into one slot: B and x of both slices of one sub-chunk."""
    pair, part = split_pair(pair, form)
    group = get_head(pair, 0, work.heads_per_group, form) // work.heads_per_group
    fetch_slice(B_desc, b, token, group * form.PARTS + part, form.PARTS, bar, tiles.B.index(slot))
    for u in gl.static_range(2):
        part = get_head(pair, u, work.heads_per_group, form) * form.SLICES + u * (form.SLICES - 1)
        fetch_slice(x_desc, b, token, part, form.SLICES, bar, tiles.x.index(2 * slot + u))


@gluon.jit(do_not_specialize=SIZES)
def hopper_states_kernel(x_desc, B_desc, dy_desc, C_desc, states_desc, dA_cumsum, dt, initial_states, dfinal_states,
                         ends, factors, final_states, runs, nruns, forwards, nsub, nheads, heads_per_group,
                         blocks, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, ODD: gl.constexpr, EVERY: gl.constexpr,
                         STAGES: gl.constexpr):
    BACKWARDS: gl.constexpr = dy_desc is not None
    if states_desc is None:
        let_next_begin()
    gl.static_assert(EVERY == 1 or not BACKWARDS, "walks backwards keep the state of each sub-chunk")
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[-1]
    WIDTH: gl.constexpr = B_desc.block_shape[-1]
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, WIDTH, ODD)
    Xs = allocate_tiles(x_desc, 2 * STAGES)
    Bs = allocate_tiles(B_desc, STAGES)
    if states_desc is None:
        Ss: gl.constexpr = None
    else:
        KEPT: gl.constexpr = 2 if states_desc.dtype.primitive_bitwidth == 16 else 1
        Ss = allocate_tiles(states_desc, 2 * KEPT)
    weights = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = make_ring(STAGES, 2)
    entries = Entries(None, None)
    if blocks is not None:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.float32)
        Es = gl.allocate_shared_memory(gl.float32, [2, ROWS, WIDTH], LAYOUT)
        entries = Entries(Es, make_ring(1, 2))
    fence_async_shared()
    if blocks is None:
        documents = Documents(None, None, None, None, None)
        start = Start(initial_states, dfinal_states, ends, factors)
    else:
        documents = Documents(blocks, load_field(blocks, nsub, TOKEN), initial_states, dfinal_states, final_states)
        start = Start(None, None, ends, factors)
    tiles, work = Tiles(Xs, Bs, Ss, weights), Work(runs, nruns, forwards, nsub, nheads, heads_per_group, documents)
    gl.warp_specialize([
        (walk_slice, (ring, entries, tiles, states_desc, dA_cumsum, dt, start, final_states, work, FORM, 0, EVERY, BACKWARDS,
                      BLOCK_M, ROWS, WIDTH)),
        (walk_slice, (ring, entries, tiles, states_desc, dA_cumsum, dt, start, final_states, work, FORM, 1, EVERY, BACKWARDS,
                      BLOCK_M, ROWS, WIDTH)),
        (fetch_tiles, (x_desc, B_desc, dy_desc, C_desc, ring, entries, tiles, work, FORM, states_desc is None, BACKWARDS)),
    ], [4, 1], [152 if WIDTH <= 128 else 224, 24 if blocks is None else 40])


def piece_states(i: SSDInputs, descriptors, dt, dA_cumsum, npieces: int, runs, forwards: int, blocks=None,
                 starts=(None, None)) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ends and factors. descriptors: of x, B, and of dy, C if rows from `forwards` on are walked backwards.

    runs: (blocks, nruns, 6) int32. blocks: those of documents, in place of sub-chunks; starts: descriptors of their
    initial_states and dfinal_states, each or None for zeros.
    """
    ends = torch.empty(npieces, 2, *(d.block_shape[-1] for d in descriptors[:2]), device=i.x.device, dtype=torch.float32)
    factors = torch.empty(npieces, 2, device=i.x.device, dtype=torch.float32)
    _launch(i, descriptors, None, dt, dA_cumsum, runs, starts, ends, factors, None, forwards, dt.shape[3], blocks)
    return ends, factors


def all_states(i: SSDInputs, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards: int,
               every: int, blocks=None) -> None:
    """Fills what states_desc describes, states every `every` tokens, and final_states unless None.

    descriptors, runs: as above. starts: initial_states and dfinal_states, contiguous, each or None for zeros. ends and factors:
    of the pieces that enter the runs, if any do. blocks: those of documents, in place of sub-chunks; starts and final_states
    are then descriptors of the documents', the last in tiles half as wide as a part.
    """
    _launch(i, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards, every, blocks)


def _launch(i: SSDInputs, descriptors, states_desc, dt, dA_cumsum, runs, starts, ends, factors, final_states, forwards: int,
            every: int, blocks) -> None:
    descriptors = (*descriptors, None, None)[:4]
    launch(hopper_states_kernel, runs.shape[0], *descriptors, states_desc, dA_cumsum, dt, *starts, ends, factors, final_states,
           runs, runs.shape[1], forwards, dt.shape[2], i.nheads, i.nheads // i.ngroups, blocks, HEADDIM=i.headdim,
           DSTATE=i.dstate, ODD=i.nheads // i.ngroups % 2 == 1, EVERY=every // dt.shape[3],
           STAGES=STAGES if dt.shape[3] == SUB_CHUNK else 2, num_warps=4,
           maxnreg=_REGISTERS, launch_pdl=states_desc is not None and may_begin_early(ends, *starts))
