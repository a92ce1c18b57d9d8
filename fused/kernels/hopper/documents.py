"""Documents with states of their own, in Gluon, for Hopper: what the roles of the kernels do in place of walking a row.

A walk goes through blocks of up to 64 tokens of one document each (`ssd/kernels/document_blocks.py`) instead of the sub-chunks
of a row. A block that begins a document sets the state to the document's own, one that ends it stores the state; backwards the
other way round. The scan loads that state, and its producer prefetches it into L2 when it fetches the block's tiles; in
`walks` it comes by the TMA (`document_states`). Tiles are fetched whole, so a short block has tokens of the document
before it, first. Their steps are 0 and their A is -128, so nothing of theirs enters a state, forwards or backwards, unless it
is not finite. What leaves by the TMA would overwrite theirs, so what a short block leaves is stored from shared memory.

Runs are dealt as if there were as many blocks as the worst documents need. Each goes over its share of those that there are.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd.kernels import document_blocks

from .roles import Run, get_head, get_tile, load_run, locate_state, prefetch, state_mask, store_masked, write_slice
from .start import load_given_state, row_layout

FIELDS = gl.constexpr(document_blocks.FIELDS.value)
# Of a block: the first token of its tiles; how many of these tokens, the last ones, are its own; the document that it begins,
# and that it ends, or -1; the first and the last block of its document. Behind all blocks, TOKEN is how many there are.
TOKEN, COUNT, BEGUN, ENDED, FIRST_BLOCK, LAST_BLOCK = map(gl.constexpr, range(document_blocks.FIELDS.value))


class Documents(NamedTuple):
    """Where the blocks of documents lie, `total` of them, and the documents' states (ndocs, nheads, headdim, dstate). All None
    where rows are walked.

    States that are None are zero, or final_states not asked for. Of walks backwards these are the gradients of initial_states.
    They are TMA descriptors in `walks`, else pointers.
    """

    blocks: gl.tensor
    total: gl.tensor
    initial_states: gl.tensor
    dfinal_states: gl.tensor
    final_states: gl.tensor


@gluon.jit
def scale_bound(work, c):
    """Where a run that was dealt from c on begins among the blocks that there are. In fp32, which keeps the order of bounds."""
    total = work.documents.total
    scaled = (c.to(gl.float32) * (total.to(gl.float32) / work.nsub.to(gl.float32))).to(gl.int32)
    return gl.where(c == work.nsub, total, gl.minimum(scaled, total - 1))


@gluon.jit
def get_run(work, k):
    """Run k of the table; of documents, that share of their blocks."""
    run = load_run(work.runs, k)
    if work.documents.blocks is not None:
        first, last = scale_bound(work, run.first), scale_bound(work, run.last)
        run = Run(run.b, run.pair, first, last, run.piece, run.npieces)
    return run


@gluon.jit
def is_run(work, k, run):
    """Whether run k, which `get_run` gave, is none of the empty ones that fill up the table."""
    if work.documents.blocks is None:
        filled = run.first < run.last
    else:
        dealt = load_run(work.runs, k)
        filled = dealt.first < dealt.last
    return filled


@gluon.jit
def load_field(blocks, c, FIELD: gl.constexpr):
    """A number of block c."""
    return gl.load(blocks + c * FIELDS + FIELD)


@gluon.jit
def load_document_state(states, document, h, nheads, STATE: gl.constexpr, SLICE: gl.constexpr, part, form: gl.constexpr,
                        ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of a part of the state of head h of a document; zero if `states` is None."""
    return load_given_state(states, document.to(gl.int64) * nheads + h, STATE, SLICE, part, form, ROWS, WIDTH)


@gluon.jit
def prefetch_document_states(states, document, pair, nheads, heads_per_group, form: gl.constexpr):
    """Begins to bring what `load_document_state` will load for a pair of slices into L2: all of a head, or of two.

    Not with parts of dstate, where it has gaps.
    """
    if states is not None and form.PARTS == 1:  # noqa: SIM102
        if document >= 0:
            SIZE: gl.constexpr = form.HEADDIM * form.DSTATE
            for u in gl.static_range(2 // form.SLICES):
                head = document.to(gl.int64) * nheads + get_head(pair, u, heads_per_group, form)
                prefetch(states + head * SIZE, SIZE * states.dtype.element_ty.primitive_bitwidth // 8)


@gluon.jit
def store_document_state(states, state, document, h, nheads, STATE: gl.constexpr, SLICE: gl.constexpr, part,
                         form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The other way. states: fp32."""
    at = locate_state(states, document.to(gl.int64) * nheads + h, STATE, SLICE, part, form, ROWS, WIDTH)
    store_masked(at, state, state_mask(STATE, SLICE, part, form, ROWS, WIDTH))


@gluon.jit
def write_block(desc, to, token, count, head, slice, nheads, form: gl.constexpr, tiles, k: gl.constexpr,
                BLOCK_M: gl.constexpr, ROWS: gl.constexpr):
    """From tile k, a slice of a head of a block's tokens, to `to`, contiguous, which desc describes.

    The warps must meet before they store into the tile again.
    """
    if count == BLOCK_M:
        write_slice(desc, 0, token, head * form.SLICES + slice, form.SLICES, tiles.index(k))
    else:
        LAYOUT: gl.constexpr = row_layout(ROWS)
        m, p = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
        first = to + ((token.to(gl.int64) * nheads + head) * form.HEADDIM + slice * ROWS)
        at = first + (gl.expand_dims(m * (nheads * form.HEADDIM), 1) + gl.expand_dims(p, 0))
        mask = gl.expand_dims(m >= BLOCK_M - count, 1)
        if form.HEADDIM % ROWS:
            mask = mask & gl.expand_dims(p < form.HEADDIM - slice * ROWS, 0)
        gl.store(at, get_tile(tiles, k, BLOCK_M, ROWS).load(LAYOUT), mask=mask)
