"""hopper_pairs: what a backward has of pairs of tokens in one span of 128, after `ends`, in Gluon, for Hopper.

    L_ji = exp(A_i - A_j) for i >= j,  u_j = sum_i (B C^T L)_ji dy_i,  dx_j += dt_j u_j + D dy_j
    dCB_ij = sum_heads K_ij,  K_ij = L_ji dt_j (dy_i . x_j),  dC_i += sum_j dCB_ij B_j,  dB_j += sum_i dCB_ij C_i
    row_i and col_j, the sums of K_ij CB_ij below the diagonal

of equations (18), (19), (21), (22), (30) and (31) of docs/ssd.md. A block takes tiles: a span of one group, or of a split of
its heads. It takes their heads in order and keeps dCB in registers. Rows are tokens j of one half of the span. Roles:

    multiply_pairs (1 warpgroup a half): the pairs of its rows with the i of their own half, and those of the first half with
                                         the i of the second as well; then dB of its rows and dC of its half
    fetch_vectors (4 warps):             A and dt of each head, as vectors in shared memory
    fetch_tiles (1 warp):                x, dy, dx of each slice of a head by TMA, and B and C before and after a tile's heads

B and C go through the same slots in the places of x and dy, 64 states at a time: B C^T is then made as x dy^T is, and dB as u.
The second half's dC needs what the first half's rows have summed: it is handed over in shared memory at the end of a tile.

Reads x, dy, dx (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, through TMA descriptors;
dt, dA_cumsum (batch, nheads, nspans, 128) fp32; v . x (slices, batch, nheads, nspans, 128) fp32; D (nheads,). Adds to dx;
writes dB, dC contiguous (splits, batch, seqlen, ngroups, dstate), to the first split's of which it adds what `ends` left; and
(u + v) . x, q, dy . x, row of the pairs in the second half less col, and row of all others, (batch, nheads, nspans, 128) fp32.
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
from ssd.runtime.gluon_names import block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .group_tiles import Sizes, Tile, Vectors, as_box, fetch_vectors, find_tile, store_rows
from .ring import Ring, make_barriers, make_ring, mark_empty, slot_of, wait_empty, wait_full
from .roles import allocate_tiles, decay, fetch_slice, get_tile, make_form, tile_bytes, write_slice

SIZES = ("ntiles", "batch", "seqlen", "nspans", "ngroups", "heads_per_group", "stride")
SLOTS, LINES = 3, 2  # slots of the ring of tiles, and of that of vectors
_REGISTERS = 128  # of a thread at launch; the roles then share them out: 232 multiply_pairs, 24 the rest


class Rings(NamedTuple):
    """Which slots of shared memory are full or empty."""

    tiles: Ring
    vectors: Ring
    pairs: gl.shared_memory_descriptor  # the mbarrier of dCB of the pairs between the halves, in each tile


class Tiles(NamedTuple):
    """By slot of `tiles` and half of a span, [2 SLOTS, 1, 64, 64] each: x, dy and dx of a slice of a head; or B, C as x, dy."""

    x: gl.shared_memory_descriptor
    dy: gl.shared_memory_descriptor
    dx: gl.shared_memory_descriptor  # on its way in, and out
    CB: gl.shared_memory_descriptor  # [3, 64, 64] fp32: B C^T [j, i] of the first half, of the second and between them
    pairs: gl.shared_memory_descriptor  # [3, 64, 64]: likewise dCB


class Sums(NamedTuple):
    """What is summed over a token's channels, (batch, nheads, nspans, 128) fp32 each; and v . x, likewise, a part a slice."""

    step: gl.tensor  # (u + v) . x
    state: gl.tensor  # q
    inner: gl.tensor  # row of pairs in the second half, less col
    outer: gl.tensor  # row of all other pairs
    skip: gl.tensor  # dy . x, or None
    v_x: gl.tensor
    stride: gl.tensor  # of its parts


class Gradients(NamedTuple):
    """dB and dC by split, and what is added to the first split's."""

    dB: gl.tensor
    dC: gl.tensor
    dB_before: gl.tensor
    dC_before: gl.tensor


@gluon.jit
def weigh_pairs(x_dy, CB, dCB, A_i, A_j, dt_j, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """dCB with a head's K added; the weights of dy_i in u_j; u_j . x_j; and row_i. The last two are without the diagonal."""
    L = decay(gl.expand_dims(A_i, 0) - gl.expand_dims(A_j, 1))
    dCB += x_dy * L * gl.expand_dims(dt_j, 1)
    L = L * CB
    weights = gl.convert_layout(L.to(DTYPE), OPERAND)
    L = L * x_dy
    return dCB, weights, gl.sum(L, 1), gl.sum(L * gl.expand_dims(dt_j, 1), 0)


@gluon.jit
def multiply_rows(left, right, U: gl.constexpr, slot, SIZE: gl.constexpr, total):
    """Into `total`: x_j . dy_i of a slice, of the rows' own half and, for the first half, between the halves."""
    own, other = total
    x = get_tile(left, 2 * slot + U, SIZE, SIZE)
    own = warpgroup_mma(x, get_tile(right, 2 * slot + U, SIZE, SIZE).permute((1, 0)), own, is_async=True)
    if U == 0:
        other = warpgroup_mma(x, get_tile(right, 2 * slot + 1, SIZE, SIZE).permute((1, 0)), other, is_async=True)
    return own, other


@gluon.jit
def weigh_rows(own, other, right, U: gl.constexpr, slot, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum over i of weights and the rows dy_i of a slice, of `own` weights and, for the first half, of `other` ones."""
    total = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
    total = warpgroup_mma(own, get_tile(right, 2 * slot + U, SIZE, SIZE), total, use_acc=False, is_async=True)
    if U == 0:
        total = warpgroup_mma(other, get_tile(right, 2 * slot + 1, SIZE, SIZE), total, is_async=True)
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def multiply_pairs(dx_desc, rings, tiles, vectors, D, gradients, sums, sizes, form: gl.constexpr, U: gl.constexpr,
                   SPLITS: gl.constexpr):
    """The consumer warpgroup of half U."""
    M: gl.constexpr = tiles.pairs.shape[1]
    SPAN: gl.constexpr = 2 * M
    SLICES: gl.constexpr = form.SLICES
    PARTS: gl.constexpr = form.PARTS
    DTYPE: gl.constexpr = tiles.x.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JI, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, JI)
    COLUMN: gl.constexpr = gl.SliceLayout(0, JI)
    j, i = gl.arange(0, M, ROW), gl.arange(0, M, COLUMN)
    same = gl.expand_dims(i, 0) == gl.expand_dims(j, 1)
    step, head_step = 0, 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile = find_tile(t, sizes, SPLITS)
        zeros = gl.zeros([M, M], gl.float32, JI)
        CB, CB_other = zeros, zeros
        for _n in gl.static_range(PARTS):
            slot = slot_of(rings.tiles, step)
            wait_full(rings.tiles, step)
            CB, CB_other = multiply_rows(tiles.x, tiles.dy, U, slot, M, (CB, CB_other))
            CB, CB_other = warpgroup_mma_wait(0, deps=(CB, CB_other))
            block_barrier()
            mark_empty(rings.tiles, slot)
            step += 1
        own = gl.sum(gl.where(same, CB, 0.0), 1)  # B_j . C_j
        # a token's pair with itself cancels in row - col, and u gets it by itself
        tiles.CB.index(U).store(gl.where(gl.expand_dims(i, 0) > gl.expand_dims(j, 1), CB, 0.0))
        if U == 0:
            tiles.CB.index(2).store(CB_other)
        dCB, dCB_other = zeros, zeros
        for k in range(tile.count):
            line = slot_of(rings.vectors, head_step)
            at = (tile.row + k * sizes.nsub) * SPAN + U * M
            v_x, v_x_second = gl.load(sums.v_x + at + j), own * 0.0
            if form.SLICES == 2:
                v_x_second = gl.load(sums.v_x + sums.stride + at + j)
            skip = own * 0.0
            if D is not None:
                skip += gl.load(D + tile.head + k).to(gl.float32)
            x_dy, x_dy_other = zeros, zeros
            for n in gl.static_range(SLICES):
                wait_full(rings.tiles, step + n)
                slot = slot_of(rings.tiles, step + n)
                x_dy, x_dy_other = multiply_rows(tiles.x, tiles.dy, U, slot, M, (x_dy, x_dy_other))
            wait_full(rings.vectors, head_step)
            A, dt = vectors.A.index(line), vectors.dt.index(line)
            A_j, dt_j = A.slice(U * M, M).load(ROW), dt.slice(U * M, M).load(ROW)
            x_dy, x_dy_other = warpgroup_mma_wait(0, deps=(x_dy, x_dy_other))
            own_x_dy = gl.sum(gl.where(same, x_dy, 0.0), 1)
            v_x += v_x_second
            dCB, weights, u_x, row = weigh_pairs(x_dy, tiles.CB.index(U).load(JI), dCB, A.slice(U * M, M).load(COLUMN), A_j,
                                                 dt_j, DTYPE, OPERAND)
            weights_other = weights
            if U == 0:
                dCB_other, weights_other, u_x_other, row_other = weigh_pairs(
                    x_dy_other, tiles.CB.index(2).load(JI), dCB_other, A.slice(M, M).load(COLUMN), A_j, dt_j, DTYPE, OPERAND)
                u_x += u_x_other
                gl.store(sums.outer + at + i, row)
                gl.store(sums.outer + at + M + i, row_other)
                gl.store(sums.inner + at + j, -dt_j * u_x)
            else:
                gl.store(sums.inner + at + j, gl.convert_layout(row, ROW) - dt_j * u_x)
            gl.store(sums.step + at + j, u_x + v_x + own * own_x_dy)
            gl.store(sums.state + at + j, dt_j * v_x)
            if sums.skip is not None:
                gl.store(sums.skip + at + j, own_x_dy)
            skip += dt_j * own
            for n in gl.static_range(SLICES):
                slot = slot_of(rings.tiles, step + n)
                u = weigh_rows(weights, weights_other, tiles.dy, U, slot, M, JI)
                dx_tile = get_tile(tiles.dx, 2 * slot + U, M, M)
                dx = dx_tile.load(JI).to(gl.float32) + u * gl.expand_dims(dt_j, 1)
                dx += get_tile(tiles.dy, 2 * slot + U, M, M).load(JI).to(gl.float32) * gl.expand_dims(skip, 1)
                dx_tile.store(dx.to(DTYPE))
                fence_async_shared()
                block_barrier()
                write_slice(dx_desc, tile.b, tile.c * SPAN + U * M, (tile.head + k) * form.SLICES + n, form.SLICES,
                            tiles.dx.index(2 * slot + U))
            mark_empty(rings.vectors, line)
            store_wait(0)  # before what it reads is filled again
            block_barrier()
            for n in gl.static_range(SLICES):
                mark_empty(rings.tiles, slot_of(rings.tiles, step + n))
            step += form.SLICES
            head_step += 1
        pairs = gl.where(gl.expand_dims(i, 0) >= gl.expand_dims(j, 1), dCB, 0.0).to(DTYPE)
        tiles.pairs.index(U).store(pairs)
        if U == 0:
            # half 1 has read that of the tile before: the slots of all PARTS since, no fewer than SLOTS, have been given back
            tiles.pairs.index(2).store(dCB_other.to(DTYPE))
        fence_async_shared()
        block_barrier()
        if U == 0:
            mbarrier.arrive(rings.pairs.index(0), count=1)
        else:
            mbarrier.wait(rings.pairs.index(0), turn & 1)
        pairs, pairs_other = gl.convert_layout(pairs, OPERAND), gl.convert_layout(dCB_other.to(DTYPE), OPERAND)
        half = Tile(tile.b, tile.c * 2 + U, tile.group, tile.split, tile.head, tile.count, tile.row)
        for n in gl.static_range(PARTS):
            wait_full(rings.tiles, step)
            slot = slot_of(rings.tiles, step)
            rows = weigh_rows(pairs, pairs_other, tiles.dy, U, slot, M, JI)
            store_rows(gradients.dB, half, rows, sizes, n, form, JI, gradients.dB_before)
            B = get_tile(tiles.x, 2 * slot + U, M, M)
            rows = warpgroup_mma(tiles.pairs.index(U).permute((1, 0)), B, zeros, use_acc=False, is_async=True)
            if U == 1:
                B = get_tile(tiles.x, 2 * slot, M, M)
                rows = warpgroup_mma(tiles.pairs.index(2).permute((1, 0)), B, rows, is_async=True)
            rows = warpgroup_mma_wait(0, deps=(rows,))
            block_barrier()
            mark_empty(rings.tiles, slot)
            store_rows(gradients.dC, half, rows, sizes, n, form, JI, gradients.dC_before)
            step += 1


@gluon.jit
def fetch_halves(desc, b, token, k, SLICES: gl.constexpr, bar, tiles, slot, M: gl.constexpr):
    """Both halves of a span, of slice k."""
    for u in gl.static_range(2):
        fetch_slice(desc, b, token + u * M, k, SLICES, bar, as_box(tiles.index(2 * slot + u), desc))


@gluon.jit
def fetch_tiles(x_desc, dy_desc, B_desc, C_desc, dx_desc, ring, tiles, sizes, form: gl.constexpr, SPLITS: gl.constexpr):
    """The producer: B and C of each tile, x, dy and dx of each slice of its heads, and B and C again."""
    M: gl.constexpr = tiles.pairs.shape[1]
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        tile = find_tile(t, sizes, SPLITS)
        token = tile.c * (2 * M)
        for n in range(tile.count * form.SLICES + 2 * form.PARTS):
            slot = slot_of(ring, step)
            wait_empty(ring, step)
            bar = ring.full.index(slot)
            k = n - form.PARTS  # of the slices, which B and C are before and after
            if (k >= 0) & (k < tile.count * form.SLICES):
                mbarrier.expect(bar, 2 * (tile_bytes(x_desc) + tile_bytes(dy_desc) + tile_bytes(dx_desc)))
                k += tile.head * form.SLICES
                fetch_halves(x_desc, tile.b, token, k, form.SLICES, bar, tiles.x, slot, M)
                fetch_halves(dy_desc, tile.b, token, k, form.SLICES, bar, tiles.dy, slot, M)
                fetch_halves(dx_desc, tile.b, token, k, form.SLICES, bar, tiles.dx, slot, M)
            else:
                mbarrier.expect(bar, 2 * (tile_bytes(B_desc) + tile_bytes(C_desc)))
                k = tile.group * form.PARTS + gl.where(k < 0, n, k - tile.count * form.SLICES)
                fetch_halves(B_desc, tile.b, token, k, form.PARTS, bar, tiles.x, slot, M)
                fetch_halves(C_desc, tile.b, token, k, form.PARTS, bar, tiles.dy, slot, M)
            step += 1


@gluon.jit(do_not_specialize=SIZES)
def hopper_pairs_kernel(x_desc, dy_desc, B_desc, C_desc, dx_desc, dA_cumsum, dt, D, dB, dC, dB_before, dC_before, step_sums,
                        state_sums, inner, outer, skip_sums, v_x, stride, ntiles, batch, seqlen, nspans, ngroups,
                        heads_per_group, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr,
                        LINES: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    M: gl.constexpr = x_desc.block_shape[1]
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, M], DTYPE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, M, M)
    pairs = gl.allocate_shared_memory(DTYPE, [3, M, M], SQUARE)
    tiles = Tiles(allocate_tiles(x_desc, 2 * SLOTS), allocate_tiles(dy_desc, 2 * SLOTS), allocate_tiles(dx_desc, 2 * SLOTS),
                  gl.allocate_shared_memory(gl.float32, [3, M, M], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])), pairs)
    vectors = Vectors(gl.allocate_shared_memory(gl.float32, [LINES, 2 * M], LINE),
                      gl.allocate_shared_memory(gl.float32, [LINES, 2 * M], LINE))
    rings = Rings(make_ring(SLOTS, 2), make_ring(LINES, 2), make_barriers(1, 1))
    fence_async_shared()
    sums = Sums(step_sums, state_sums, inner, outer, skip_sums, v_x, stride)
    gradients = Gradients(dB, dC, dB_before, dC_before)
    sizes = Sizes(ntiles, batch, seqlen, nspans, ngroups, heads_per_group, None)
    gl.warp_specialize([
        (multiply_pairs, (dx_desc, rings, tiles, vectors, D, gradients, sums, sizes, FORM, 0, SPLITS)),
        (multiply_pairs, (dx_desc, rings, tiles, vectors, D, gradients, sums, sizes, FORM, 1, SPLITS)),
        (fetch_vectors, (rings.vectors, vectors, dA_cumsum, dt, sizes, 1, 2 * M, SPLITS, False)),
        (fetch_tiles, (x_desc, dy_desc, B_desc, C_desc, dx_desc, rings.tiles, tiles, sizes, FORM, SPLITS)),
    ], [4, 4, 1], [232, 24, 24])


def hopper_pairs(i: SSDInputs, x_desc, dy_desc, B_desc, C_desc, dx_desc, dt, dA_cumsum, v_x, outer, dB, dC, dB_before,
                 dC_before, programs: int):
    """Adds to what dx_desc describes, fills dB, dC (splits, batch, seqlen, ngroups, dstate), the first split's with what is in
    dB_before and dC_before, and outer, row of pairs with a j in the first half of a span; returns (u + v) . x, q, row of the
    other pairs less col, and dy . x (None without D).

    All descriptors are of tiles of 64 tokens and 64 channels or states.
    """
    step, state, inner, skip = torch.empty(4, *dt.shape, device=dt.device, dtype=torch.float32)
    skip = None if i.D is None else skip
    ntiles = i.batch * dt.shape[2] * i.ngroups * dB.shape[0]
    launch(
        hopper_pairs_kernel, min(ntiles, programs), x_desc, dy_desc, B_desc, C_desc, dx_desc, dA_cumsum, dt, contiguous(i.D),
        dB, dC, dB_before, dC_before, step, state, inner, outer, skip, v_x, dt.numel(), ntiles, i.batch, i.seqlen, dt.shape[2],
        i.ngroups, i.nheads // i.ngroups, HEADDIM=i.headdim, DSTATE=i.dstate, SPLITS=dB.shape[0], SLOTS=SLOTS, LINES=LINES,
        num_warps=4, maxnreg=_REGISTERS)
    return step, state, inner, skip
