"""What the kernels of the backward on Hopper share: memory, vectors, and how tiles are numbered: which part of dB and dC each
is, and which heads it sums over. "Sub-chunk" is a span where these are of 128 tokens.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd.runtime.gluon_names import block_barrier, reinterpret

from .documents import COUNT, TOKEN, load_field, write_block
from .factors import store_factors
from .ring import Ring, mark_full, slot_of, wait_empty
from .roles import LOG2E, load_steps, write_slice


class Sizes(NamedTuple):
    """Of the call. A split is a part of a group's heads whose dB and dC are summed apart from the others'."""

    ntiles: gl.tensor
    batch: gl.tensor
    seqlen: gl.tensor
    nsub: gl.tensor
    ngroups: gl.tensor
    heads_per_group: gl.tensor
    blocks: gl.tensor  # of documents with states of their own, in place of sub-chunks, or None


class Tile(NamedTuple):
    """A tile: batch row, sub-chunk, group and split; its first head and number of heads, at least one; and where that head's
    sub-chunk is in (batch, nheads, nsub).
    """

    b: gl.tensor
    c: gl.tensor
    group: gl.tensor
    split: gl.tensor
    head: gl.tensor
    count: gl.tensor
    row: gl.tensor


class Rings(NamedTuple):
    """Which slots of shared memory are full or empty."""

    tiles: Ring
    vectors: Ring
    pairs: Ring
    dx: gl.shared_memory_descriptor  # the mbarrier of the tile of dx, where one is read before it is written; or None


class Tiles(NamedTuple):
    """By slot of `tiles`: x, dy [64, 64], H, G [64, 64 or 128] of a slice; or B, C [64, 64 or 128] as H, G."""

    x: gl.shared_memory_descriptor
    dy: gl.shared_memory_descriptor
    H: gl.shared_memory_descriptor
    G: gl.shared_memory_descriptor
    dx: gl.shared_memory_descriptor  # [64, headdim], on its way out
    CB: gl.shared_memory_descriptor  # [64, 64] fp32, of compute_dC alone, for want of registers
    dCB: gl.shared_memory_descriptor  # [64, 64], the slot of `pairs`


class Vectors(NamedTuple):
    """Shared memory [LINES, 128] fp32 by slot of `vectors`: A, for powers of 2, and dt."""

    A: gl.shared_memory_descriptor
    dt: gl.shared_memory_descriptor


class Sums(NamedTuple):
    """What is summed over a token's channels, (batch, nheads, nsub, 64) fp32 each, and s (batch, nheads, nsub). All are sums
    over dstate as well, but for dy . x: a launch for a second part of it adds those of the first, and leaves dy . x as it is.
    """

    step: gl.tensor  # (u + v) . x
    state: gl.tensor  # q
    output: gl.tensor  # r + row
    pair: gl.tensor  # col
    skip: gl.tensor  # dy . x
    s: gl.tensor


@gluon.jit
def find_tile(t, sizes, SPLITS: gl.constexpr):
    """Tile number t. Groups of a sub-chunk are neighbours."""
    slot, row = t % (sizes.ngroups * SPLITS), t // (sizes.ngroups * SPLITS)
    b, c, group, split = row // sizes.nsub, row % sizes.nsub, slot // SPLITS, slot % SPLITS
    each = (sizes.heads_per_group + SPLITS - 1) // SPLITS
    head = group * sizes.heads_per_group + split * each
    at = (b * sizes.ngroups * sizes.heads_per_group + head) * sizes.nsub + c
    return Tile(b, c, group, split, head, gl.minimum(each, sizes.heads_per_group - split * each), at)


@gluon.jit
def fetch_vectors(ring, vectors, dA_cumsum, dt, sizes, SLICES: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr,
                  FACTORS: gl.constexpr):
    """The producer of vectors, of each head, or of each slice of it anew. FACTORS: `vectors` are of that class.

    A token a thread, of two warps at least: racecheck takes the barrier of one for none (docs/log/sanitizer.md).
    """
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [BLOCK_M // 32], [0]))
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        tile = find_tile(t, sizes, SPLITS)
        at = tile.row * BLOCK_M
        a, dt_k, last = load_steps(dA_cumsum, dt, at, m, BLOCK_M)
        first = gl.load(dA_cumsum + at)
        for k in range(tile.count * SLICES):
            line = slot_of(ring, step)
            wait_empty(ring, step)
            if FACTORS:
                store_factors(vectors, line, a, first, last)
            else:
                vectors.A.index(line).store(a * LOG2E)
            vectors.dt.index(line).store(dt_k)
            block_barrier()
            mark_full(ring, line)
            at = (tile.row + gl.minimum(k + 1, tile.count * SLICES - 1) // SLICES * sizes.nsub) * BLOCK_M
            a, dt_k, last = load_steps(dA_cumsum, dt, at, m, BLOCK_M)
            first = gl.load(dA_cumsum + at)
            step += 1


@gluon.jit
def get_token(tile, sizes, BLOCK_M: gl.constexpr):
    """The first token of a tile."""
    return tile.c * BLOCK_M if sizes.blocks is None else load_field(sizes.blocks, tile.c, TOKEN)


@gluon.jit
def get_ntokens(tile, sizes):
    """How many tokens of a tile, the last ones, are its block's. Loaded where it is used, for want of registers."""
    return load_field(sizes.blocks, tile.c, COUNT)


@gluon.jit
def write_dx(dx_desc, dx, tile, k, tiles, sizes, form: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr):
    """dx of slice k of a tile's heads, from shared memory. dx: its memory, where blocks of documents are."""
    if sizes.blocks is None:
        write_slice(dx_desc, tile.b, tile.c * BLOCK_M, tile.head * form.SLICES + k, form.SLICES, tiles.dx.index(0))
    else:
        write_block(dx_desc, dx, get_token(tile, sizes, BLOCK_M), get_ntokens(tile, sizes), tile.head + k // form.SLICES,
                    k % form.SLICES, sizes.ngroups * sizes.heads_per_group, form, tiles.dx, 0, BLOCK_M, ROWS)


@gluon.jit
def store_rows(to, tile, values, sizes, PART: gl.constexpr, form: gl.constexpr, LAYOUT: gl.constexpr, before=None):
    """`values` [M, N] of a tile and a part of dstate into a contiguous (splits, batch, seqlen, ngroups, dstate). To the first
    split's, what is in `before`, (batch, seqlen, ngroups, dstate), is added.

    Stored from the layout that they are in: once a tile, and another layout would take shared memory.
    """
    BLOCK_M: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    row = tile.split * sizes.batch + tile.b
    m = get_token(tile, sizes, BLOCK_M) + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    n = PART * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token = gl.expand_dims((row.to(gl.int64) * sizes.seqlen + m) * sizes.ngroups + tile.group, 1)
    at = token * form.DSTATE + gl.expand_dims(n, 0)
    if sizes.blocks is None:
        mask = gl.expand_dims(m < sizes.seqlen, 1)
    else:
        mask = gl.expand_dims(m >= get_token(tile, sizes, BLOCK_M) + BLOCK_M - get_ntokens(tile, sizes), 1)
    if form.DSTATE % WIDTH:
        mask = mask & gl.expand_dims(n < form.DSTATE, 0)
    if before is not None:  # noqa: SIM102
        if tile.split == 0:
            values += gl.load(before + at, mask=mask, other=0.0)
    gl.store(to + at, values.to(to.dtype.element_ty), mask=mask)


@gluon.jit
def as_box(buffer, desc):
    """A tile [1, 64, width] or [1, 64, 1, width] as one of `desc`, which has as many elements."""
    if len(desc.block_shape) != len(buffer.shape):
        LAYOUT: gl.constexpr = desc.layout  # in Triton 3.6 no constexpr by itself
        if len(desc.block_shape) == 4:
            shape: gl.constexpr = [desc.block_shape[0], desc.block_shape[1], desc.block_shape[2], desc.block_shape[3]]
        else:
            shape: gl.constexpr = [desc.block_shape[0], desc.block_shape[1], desc.block_shape[2]]
        buffer = reinterpret(buffer, shape, LAYOUT)
    return buffer
