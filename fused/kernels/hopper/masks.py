"""make_masks: the role of the forward scans that makes L = (B C^T) exp(A_i - A_j) dt_j for i >= j, in Gluon, for Hopper.

Equation (26) of docs/ssd.md. L [j, i] is wgmma's operand in shared memory; `scan` says what the roles around it do. The decays
and weights by which the slices multiply y and x are made here as well.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ssd.runtime.gluon_names import block_barrier

from .documents import get_run
from .early import wait_for_last
from .lag import defer_decay
from .ring import mark_empty, mark_full, slot_of, wait_empty, wait_full
from .roles import LOG2E, decay, get_head, get_tile, load_steps, log2
from .scan_tiles import split_columns
from .weights import pack_weights


@gluon.jit
def and_bits(a, b):
    """Bitwise and of two tensors of 16-bit elements, two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, True, 2)


@gluon.jit
def find_causal(FIRST: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Of columns i from FIRST on and rows j, those with i >= j: all bits of an element or none, so that one instruction masks
    two elements, whatever exp2 made of those above the diagonal.
    """
    j, i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.where(gl.expand_dims(i, 0) >= gl.expand_dims(j, 1), -1, 0).to(gl.int16).to(DTYPE, bitcast=True)


@gluon.jit
def store_mask(L, BC, rows, columns, causal, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of L from FIRST on, of those of B C^T."""
    COLUMNS: gl.constexpr = BC.shape[1]
    A_i = columns.slice(FIRST, COLUMNS, dim=0).load(gl.SliceLayout(0, LAYOUT))
    decayed = BC * gl.exp2(gl.expand_dims(A_i, 0) - gl.expand_dims(rows.load(gl.SliceLayout(1, LAYOUT)), 1))
    L.slice(FIRST, COLUMNS, dim=1).store(and_bits(decayed.to(L.dtype), causal))


@gluon.constexpr_function
def are_freed_with_tiles(tiles, masks):
    """Whether slots of `masks` need not be given back. tiles, masks: how many slots the rings have, `masks` for each head.

    A tile is given back when its mask has been read as well. So when a slot of `tiles` is full again, the mask of the tile that
    was in it has been read, and all masks before. That spares barriers (docs/log/hopper-breadth.md).
    """
    return tiles <= masks


@gluon.jit
def make_masks(rings, tiles, vectors, dA_cumsum, dt, start, work, form: gl.constexpr, DEFERRED: gl.constexpr,
               BLOCK_M: gl.constexpr, WIDTH: gl.constexpr):
    """The consumer warpgroup that makes L and the vectors of the pair's heads, of which there are two or one.

    In the wide scan registers are few, so L of two heads is made one half after the other. Weights are packed there
    (`weights`); in the other scan that made this role slower (8b-b1 84.4 us for 82.9). DEFERRED: of `lag`.
    """
    HEADS: gl.constexpr = 2 // form.SLICES
    WIDE: gl.constexpr = WIDTH > 128
    HALVES: gl.constexpr = WIDE and HEADS == 2
    DTYPE: gl.constexpr = tiles.B.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M // 2, 16])
    if HALVES:
        causal = find_causal(0, BLOCK_M // 2, BLOCK_M, HALF, DTYPE)
        causal_right = find_causal(BLOCK_M // 2, BLOCK_M // 2, BLOCK_M, HALF, DTYPE)
    else:
        causal = find_causal(0, BLOCK_M, BLOCK_M, JI, DTYPE)
    FREED: gl.constexpr = are_freed_with_tiles(rings.tiles.full.shape[0], rings.masks.full.shape[0] // HEADS)
    step, pieces = 0, 0
    if start.ends is None:
        wait_for_last()
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_run(work, k)
        if start.ends_desc is not None:  # before a run's tiles come the pieces that enter it, which are the slices' alone
            for _ in range(run.npieces):
                wait_full(rings.tiles, step + pieces)
                block_barrier()
                mark_empty(rings.tiles, slot_of(rings.tiles, step + pieces))
                pieces += 1
            block_barrier()  # as in `wide_scan.scan_slice`
        first, last = run.first, run.last
        h = get_head(run.pair, 0, work.heads_per_group, form)
        row = (run.b * work.nheads + h).to(gl.int64) * work.nsub * BLOCK_M
        other = work.nsub * BLOCK_M  # from a head's row to the next one's
        if form.ODD and HEADS == 2:
            other *= get_head(run.pair, 1, work.heads_per_group, form) - h
        a0, dt0, end0 = load_steps(dA_cumsum, dt, row + first * BLOCK_M, m, BLOCK_M)
        if HEADS == 2:
            a1, dt1, end1 = load_steps(dA_cumsum, dt, row + other + first * BLOCK_M, m, BLOCK_M)
        lag0, lag1 = 0.0, 0.0
        for c in range(first, last):
            slot = slot_of(rings.tiles, step + pieces)
            wait_full(rings.tiles, step + pieces)
            B, C = get_tile(tiles.B, slot, BLOCK_M, WIDTH), get_tile(tiles.C, slot, BLOCK_M, WIDTH)
            BC = warpgroup_mma(B, C.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI), use_acc=False, is_async=True)
            if not FREED:
                for u in gl.static_range(HEADS):
                    wait_empty(rings.masks, step, u, HEADS)
            for u in gl.static_range(HEADS):
                a, dt_u, end = (a0 if u == 0 else a1) * LOG2E, dt0 if u == 0 else dt1, (end0 if u == 0 else end1) * LOG2E
                vectors.columns.index(u).store(a)
                vectors.rows.index(u).store(a - log2(dt_u))
                exponent, w = a, dt_u * decay(end - a)
                if DEFERRED and u == 0:
                    exponent, w, lag0 = defer_decay(exponent, w, lag0, end0)
                elif DEFERRED:
                    exponent, w, lag1 = defer_decay(exponent, w, lag1, end1)
                vectors.from_start.index(slot_of(rings.masks, step, u, HEADS)).store(gl.exp2(exponent))
                vectors.to_end.index(slot_of(rings.masks, step, u, HEADS)).store(pack_weights(w, DTYPE) if WIDE else w)
            # the next sub-chunk's, into the same registers: a load into others would wait here for itself
            ahead = row + gl.minimum(c + 1, last - 1) * BLOCK_M
            a0, dt0, end0 = load_steps(dA_cumsum, dt, ahead, m, BLOCK_M)
            if HEADS == 2:
                a1, dt1, end1 = load_steps(dA_cumsum, dt, ahead + other, m, BLOCK_M)
            block_barrier()
            BC = warpgroup_mma_wait(0, deps=(BC,))
            mark_empty(rings.tiles, slot)
            for u in gl.static_range(HEADS):
                L, rows = tiles.L.index(slot_of(rings.masks, step, u, HEADS)), vectors.rows.index(u)
                columns = vectors.columns.index(u)
                if HALVES:
                    left, right = split_columns(BC)
                    store_mask(L, gl.convert_layout(left, HALF), rows, columns, causal, 0, HALF)
                    store_mask(L, gl.convert_layout(right, HALF), rows, columns, causal_right, BLOCK_M // 2, HALF)
                else:
                    store_mask(L, BC, rows, columns, causal, 0, JI)
                fence_async_shared()
                block_barrier()
                mark_full(rings.masks, slot_of(rings.masks, step, u, HEADS))
            step += 1
