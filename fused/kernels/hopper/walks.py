"""Walks of sequences that sum up a state, in Gluon, for Hopper: what hopper_pieces and hopper_states share.

One block walks runs of sub-chunks, or of spans where dt is of 128 tokens, of two slices (`roles` says what a run is; with two
parts of dstate, a run's pair is 2 pair + part) and reads x, B, dt and dA_cumsum as hopper_scan does. Steps of rows from
`forwards` on go from the last sub-chunk to the first, with dy, C and decays to the token from before in the places of x, B and
dt times decays from the token on: then the gradient of the state is what is computed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ssd.runtime.gluon_names import block_barrier
from ssd.types import SUB_CHUNK

from .document_states import fetch_document_states, take_document_state
from .documents import BEGUN, ENDED, FIRST_BLOCK, LAST_BLOCK, TOKEN, Documents, get_run, load_field
from .ring import mark_empty, slot_of, wait_empty, wait_full
from .roles import Run, fetch_slice, get_head, get_tile, split_pair, tile_bytes
from .weights import weigh

# One kernel for all sizes: that a size is 1 or divisible by 16 would not make it faster.
SIZES = ("nruns", "forwards", "nsub", "nheads", "heads_per_group")


class Work(NamedTuple):
    """The runs of all blocks, nruns of them for each, and sizes. Rows from `forwards` on are walked backwards."""

    runs: gl.tensor
    nruns: gl.tensor
    forwards: gl.tensor
    nsub: gl.tensor
    nheads: gl.tensor
    heads_per_group: gl.tensor
    documents: Documents


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
def add_step(state, factor, ring, tiles, step, slot, line, STATE: gl.constexpr, U: gl.constexpr, BLOCK_M: gl.constexpr,
             ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Slice U's S <- factor S + (x w)^T B at this step, whose slot is then given back.

    line: of tiles.weights, where w has been stored, packed. factor: None for 1.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    block_barrier()
    w = gl.expand_dims(tiles.weights.index(line).load(gl.SliceLayout(0, OPERAND)), 0)
    wait_full(ring, step)
    x = get_tile(tiles.x, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0)).load(OPERAND)
    x_end = weigh(x, w)
    B = get_tile(tiles.B, slot, BLOCK_M, WIDTH)
    if factor is not None:
        state = state * factor
    state = warpgroup_mma(x_end, B, state, is_async=True)  # [P, M] @ [M, N]
    state = warpgroup_mma_wait(0, deps=(state,))
    block_barrier()
    mark_empty(ring, slot)
    return state


@gluon.jit
def get_step(n, run, LAST_FIRST: gl.constexpr):
    """The n-th step of a run, counted from its first one's number on."""
    return run.first + run.last - 1 - n if LAST_FIRST else n


@gluon.jit
def fetch_tiles(x_desc, B_desc, dy_desc, C_desc, ring, entries, tiles, work, form: gl.constexpr, PIECES: gl.constexpr,
                LAST_FIRST: gl.constexpr, BACKWARDS: gl.constexpr):
    """The producer: B and x of both heads of each sub-chunk into the next free slot; of walks backwards C and dy.

    PIECES: whether runs are pieces. LAST_FIRST: from a run's last step to its first.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = 2 * tile_bytes(x_desc) + tile_bytes(B_desc)
    step, entry = 0, 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_walk(work, k, PIECES, BACKWARDS)
        b = run.b
        for n in range(run.first, run.last):
            c = get_step(n, run, LAST_FIRST)
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
        head_slice = get_head(pair, u, work.heads_per_group, form) * form.SLICES + u * (form.SLICES - 1)
        fetch_slice(x_desc, b, token, head_slice, form.SLICES, bar, tiles.x.index(2 * slot + u))


def count_stages(dt) -> int:
    """Slots of the ring. dt: (batch, nheads, nsub, tokens) fp32, whose last size is that of a sub-chunk or a span."""
    return 3 if dt.shape[3] == SUB_CHUNK else 2
