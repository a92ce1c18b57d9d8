"""What the roles of the scan on Hopper share: its memory, its results, and what a slice reads and writes beside its loop."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ssd.runtime.gluon_names import async_store, block_barrier, store_wait

from .documents import Documents
from .ring import Ring
from .roles import allocate_tiles, get_tile

COLUMNS = 64  # states of a tile by which those that are asked for leave
COPIES = gl.constexpr(8)  # the fewest columns of a product of wgmma; all of them hold the same sum
SUMS_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


class Rings(NamedTuple):
    """Which slots of shared memory are full or empty."""

    tiles: Ring
    masks: Ring  # a lane a head


class Tiles(NamedTuple):
    """Shared memory, by slot: x, B, C of `tiles`, L of `masks`; y and states, a slot a slice, on their way out."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64, 64]: both slices of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64, 64 or 128], and C
    C: gl.shared_memory_descriptor
    z: gl.shared_memory_descriptor  # as x, or None
    before: gl.shared_memory_descriptor  # as x: the output of the part of dstate before, or None
    L: gl.shared_memory_descriptor  # [HEADS SLOTS, 64, 64]
    y: gl.shared_memory_descriptor  # [2, 1, 64, 64]; [4, ...] where y before the gate goes out too
    states: gl.shared_memory_descriptor  # [2, 1, 64, 64 or 128], or None


class Vectors(NamedTuple):
    """Shared memory, lines of 64 fp32: the decays of a head's tokens.

    The first two are by slot of `masks`. The others, one for each head, turn a vector into rows and columns of L, in whose
    exponent dt_j is as log2(dt_j). That exponent cannot be clamped at 0: where A falls by more than 1e7 in a sub-chunk, fp32
    sums of it are no longer monotone, and L may overflow.
    """

    from_start: gl.shared_memory_descriptor  # exp(A_i), times exp(lag) where decays are deferred (`lag`)
    to_end: gl.shared_memory_descriptor  # dt_j exp(A_last - A_j), times exp(-lag); in the wide scan packed (`weights`)
    rows: gl.shared_memory_descriptor  # A_j - log2(dt_j)
    columns: gl.shared_memory_descriptor  # A_i


class DeferredNorm(NamedTuple):
    """A gated norm, (N9) of docs/block.md, whose factor comes after the output projection. All None without."""

    weight: gl.tensor  # (nheads, headdim), by which the gated output is multiplied
    sums: gl.tensor  # (batch, nsub * 64, slices) fp32: of the squares of the gated output before that
    squares: gl.shared_memory_descriptor  # [2, 1, 64, headdim]
    ones: gl.shared_memory_descriptor  # [COPIES, headdim], by which wgmma adds up channels


class Work(NamedTuple):
    """The runs of all blocks, nruns of them for each, and the sizes that tell where a head's tokens are."""

    runs: gl.tensor
    nruns: gl.tensor
    nsub: gl.tensor
    nheads: gl.tensor
    heads_per_group: gl.tensor
    documents: Documents


class Outputs(NamedTuple):
    """Descriptors of out, of out without the gate z and of the states before each sub-chunk; final_states. All but out may be
    None. asked: sub-chunks between the states that are written after them, nasked of them a row; None: before each.
    """

    out: gl.tensor
    y: gl.tensor
    states: gl.tensor
    final_states: gl.tensor
    out_at: gl.tensor  # the memory of out and y, where documents end inside tiles
    y_at: gl.tensor
    asked: gl.tensor
    nasked: gl.tensor


@gluon.jit
def allocate_vectors(SLOTS: gl.constexpr, HEADS: gl.constexpr, BLOCK_M: gl.constexpr):
    """SLOTS: of `masks`, of all heads."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_start = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], LINE)
    to_end = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], LINE)
    rows = gl.allocate_shared_memory(gl.float32, [HEADS, BLOCK_M], LINE)
    columns = gl.allocate_shared_memory(gl.float32, [HEADS, BLOCK_M], LINE)
    return Vectors(from_start, to_end, rows, columns)


@gluon.jit
def load_D(D, h, SLICE: gl.constexpr, form: gl.constexpr, PI: gl.constexpr, ROWS: gl.constexpr):
    """D of a head, or of a slice of its channels [P, 1] where D has two dimensions."""
    return load_channels(D, h, SLICE, form, PI, ROWS) if form.D_ROWS else gl.load(D + h).to(gl.float32)


@gluon.jit
def load_channels(t, h, SLICE: gl.constexpr, form: gl.constexpr, PI: gl.constexpr, ROWS: gl.constexpr):
    """Of t (nheads, headdim) a slice's channels [P, 1]."""
    p = SLICE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PI))
    return gl.expand_dims(gl.load(t + h * form.HEADDIM + p, mask=p < form.HEADDIM, other=0.0).to(gl.float32), 1)


@gluon.jit
def allocate_norm(weight, sums, out_desc, ROWS: gl.constexpr):
    """The norm with its shared memory. Its ones are stored, for a fence to follow."""
    DTYPE: gl.constexpr = out_desc.dtype
    FILL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(DTYPE, [COPIES, ROWS], gl.NVMMASharedLayout.get_default_for([COPIES, ROWS], DTYPE))
    ones.store(gl.zeros([COPIES, ROWS], DTYPE, FILL) + 1.0)
    return DeferredNorm(weight, sums, allocate_tiles(out_desc, 2), ones)


@gluon.jit
def begin_sums(norm, U: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr):
    """Begins the sums over channels of a slice's squares, [64, headdim] @ [headdim, COPIES]."""
    sums = gl.zeros([BLOCK_M, COPIES], gl.float32, SUMS_LAYOUT)
    squares = get_tile(norm.squares, U, BLOCK_M, ROWS)
    return warpgroup_mma(squares, norm.ones.permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def write_sums(norm, sums, sub_chunk, k, slices, BLOCK_M: gl.constexpr):
    """What `begin_sums` began, once it is there: sums of slice k of all `slices`, of the tokens of a sub-chunk.

    sub_chunk: its number among those of all rows.
    """
    sums = warpgroup_mma_wait(0, deps=(sums,))
    token = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS_LAYOUT)), 1)
    copy = gl.expand_dims(gl.arange(0, COPIES, gl.SliceLayout(0, SUMS_LAYOUT)), 0)
    at = (sub_chunk * BLOCK_M + token).to(gl.int64) * slices + k + 0 * copy  # 0: for the shape
    gl.store(norm.sums + at, sums, mask=(token < BLOCK_M) & (copy == 0))  # of one copy


@gluon.jit
def split_columns(t):
    """The left and the right half of a tensor. In a layout of wgmma threads keep what they have, by no instruction."""
    ROWS: gl.constexpr = t.shape[0]
    WIDTH: gl.constexpr = t.shape[1]
    return gl.split(gl.permute(gl.reshape(t, [ROWS, 2, WIDTH // 2]), (0, 2, 1)))


@gluon.jit
def write_asked_state(outputs, tiles, state, b, h, c, work, U: gl.constexpr, SLICE: gl.constexpr, ROWS: gl.constexpr):
    """A slice of the state before sub-chunk c, if it is one of those asked for."""
    if c % outputs.asked == 0 and c <= outputs.asked * outputs.nasked:
        at = (b * outputs.nasked + c // outputs.asked - 1) * work.nheads + h
        if state.shape[1] == outputs.states.block_shape[-1]:
            write_columns(outputs, tiles, state, at, U, SLICE, 0, ROWS)
        else:
            left, right = split_columns(state)
            write_columns(outputs, tiles, left, at, U, SLICE, 0, ROWS)
            write_columns(outputs, tiles, right, at, U, SLICE, 1, ROWS)


@gluon.jit
def write_columns(outputs, tiles, state, at, U: gl.constexpr, SLICE: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    """The whole slice or its half N by the slice's tile, which has room for no more: two would cost a stage of the ring."""
    WIDTH: gl.constexpr = state.shape[1]
    store_wait(0)
    block_barrier()
    get_tile(tiles.states, U, ROWS, WIDTH).store(state.to(outputs.states.dtype))
    fence_async_shared()
    block_barrier()
    async_store(outputs.states, [at, SLICE * ROWS, N * WIDTH], tiles.states.index(U))
