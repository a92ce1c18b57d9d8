"""hopper_ends: what a backward has of the states at the ends of spans of 128 tokens, in Gluon, for Hopper.

    dC_i = sum_heads exp(A_i) dy_i H,                   r_i = exp(A_i) (H C_i) . dy_i,  s = exp(A_last) <H, G>
    dB_j = sum_heads exp(A_last - A_j) dt_j x_j G,      dx_j = dt_j v_j,  v_j = exp(A_last - A_j) G B_j,  v . x

of equations (18), (21), (22), (24), (30) and (32) of docs/ssd.md, for a dstate above 128; `pairs` has the rest. H is the state
before a span, G the gradient of that after it. A block takes tiles: half the tokens of a span of one group, or of a split of
its heads. It takes slices of 64 channels of their heads in order and keeps dC and dB in registers. Roles:

    compute_dC (1 warpgroup): the first line
    compute_dB (1 warpgroup): the second
    fetch_tiles (1 warp):     dy, x, H and G of each slice by TMA, and before a tile's slices its C and B

Both halves of a span are neighbours, do the same and so find each other's H and G in L2; each half has <H, G> of one part of
dstate.

Reads dy, x (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate) and H, G (batch, n, nheads, headdim,
dstate), all bf16 or fp16, through TMA descriptors; of H there may be two for each span; dt, dA_cumsum (batch, nheads, nspans,
128) fp32. Writes dx, heads and channels contiguous; dC and dB contiguous (splits, batch, seqlen, ngroups, dstate); r and v . x,
a part for each slice, (slices, batch, nheads, nspans, 128) fp32; and s, for each slice and part of dstate, (batch, nheads,
nspans, 2 slices) fp32.
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

from ssd.kernels.arguments import cdiv
from ssd.runtime.gluon_names import async_load, block_barrier
from ssd.runtime.launch import launch
from ssd.types import SPAN, SUB_CHUNK, SSDInputs

from .group_tiles import Sizes, Tile, find_tile, store_rows
from .ring import Ring, make_ring, mark_empty, slot_of, wait_empty, wait_full
from .roles import LOG2E, allocate_tiles, decay, fetch_slice, get_tile, make_form, tile_bytes
from .weights import pack_weights, weigh

SIZES = ("ntiles", "batch", "seqlen", "nspans", "ngroups", "heads_per_group", "stride", "nstates", "every")
SLOTS = 2
_REGISTERS = 168  # of a thread at launch; the roles then share them out: 240 compute_dC and compute_dB, 24 fetch_tiles


class Rings(NamedTuple):
    """Which slots of shared memory are full or empty."""

    tiles: Ring
    rows: Ring  # one slot: C and B


class Tiles(NamedTuple):
    """By slot of `tiles`: dy, x [64, 64], and both parts of H and G [64, 128] in a row; both parts of C and of B."""

    dy: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    H: gl.shared_memory_descriptor
    G: gl.shared_memory_descriptor
    C: gl.shared_memory_descriptor  # [2, 1, 64, 128]
    B: gl.shared_memory_descriptor


class Sums(NamedTuple):
    """Where what is summed over a slice's channels goes; r and v . x have a part each slice, `stride` apart."""

    r: gl.tensor
    v_x: gl.tensor
    s: gl.tensor
    stride: gl.tensor


@gluon.jit
def find_half(t, sizes, SPLITS: gl.constexpr):
    """Tile number t, which is half of what `find_tile` finds; and which half."""
    return find_tile(t // 2, sizes, SPLITS), t % 2


@gluon.jit
def multiply_states(rows, states, slot, M: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [M, N] of C or B times a slice's state [P, N], over both parts of N; not waited for."""
    left, right = get_tile(rows, 0, M, WIDTH), get_tile(states, 2 * slot, M, WIDTH)
    product = gl.zeros([M, M], gl.float32, LAYOUT)
    product = warpgroup_mma(left, right.permute((1, 0)), product, use_acc=False, is_async=True)
    left, right = get_tile(rows, 1, M, WIDTH), get_tile(states, 2 * slot + 1, M, WIDTH)
    return warpgroup_mma(left, right.permute((1, 0)), product, is_async=True)


@gluon.jit
def compute_dC(rings, tiles, dA_cumsum, dC, sums, sizes, form: gl.constexpr, SPLITS: gl.constexpr):
    """The consumer warpgroup of outputs' tokens i."""
    M: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    SPAN: gl.constexpr = 2 * M
    DTYPE: gl.constexpr = tiles.x.dtype
    IP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    IN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, IN, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, IP)
    i, p = gl.arange(0, M, ROW), gl.arange(0, M, gl.SliceLayout(0, IP))
    i_operand = gl.arange(0, M, gl.SliceLayout(1, OPERAND))
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile, half = find_half(t, sizes, SPLITS)
        dC0 = gl.zeros([M, WIDTH], gl.float32, IN)
        dC1 = gl.zeros([M, WIDTH], gl.float32, IN)
        at = tile.row * SPAN
        A_i, A_operand = gl.load(dA_cumsum + at + half * M + i), gl.load(dA_cumsum + at + half * M + i_operand)
        wait_full(rings.rows, turn)
        for n in range(tile.count * form.SLICES):
            slot = slot_of(rings.tiles, step)
            end = gl.load(dA_cumsum + at + SPAN - 1)
            wait_full(rings.tiles, step)
            dy_tile = get_tile(tiles.dy, slot, M, M)
            e = multiply_states(tiles.C, tiles.H, slot, M, WIDTH, IP)
            e = warpgroup_mma_wait(0, deps=(e,))
            r = gl.sum(e * dy_tile.load(IP).to(gl.float32), 1) * decay(A_i * LOG2E)
            gl.store(sums.r + n % form.SLICES * sums.stride + at + half * M + i, r)
            # <H, G> of a part as the trace of H G^T
            H, G = get_tile(tiles.H, 2 * slot + half, M, WIDTH), get_tile(tiles.G, 2 * slot + half, M, WIDTH)
            HG = warpgroup_mma(H, G.permute((1, 0)), gl.zeros([M, M], gl.float32, IP), use_acc=False, is_async=True)
            HG = gl.where(gl.expand_dims(i, 1) == gl.expand_dims(p, 0), warpgroup_mma_wait(0, deps=(HG,)), 0.0)
            part = (at // SPAN * form.SLICES + n % form.SLICES) * 2 + half
            gl.store(sums.s + part, gl.sum(gl.sum(HG, 1), 0) * decay(end * LOG2E))
            dy = weigh(dy_tile.load(OPERAND), gl.expand_dims(pack_weights(decay(A_operand * LOG2E), DTYPE), 1))
            dC0 = warpgroup_mma(dy, get_tile(tiles.H, 2 * slot, M, WIDTH), dC0, is_async=True)
            dC1 = warpgroup_mma(dy, get_tile(tiles.H, 2 * slot + 1, M, WIDTH), dC1, is_async=True)
            at = (tile.row + gl.minimum(n + 1, tile.count * form.SLICES - 1) // form.SLICES * sizes.nsub) * SPAN
            A_i, A_operand = gl.load(dA_cumsum + at + half * M + i), gl.load(dA_cumsum + at + half * M + i_operand)
            dC0, dC1 = warpgroup_mma_wait(0, deps=(dC0, dC1))
            block_barrier()
            mark_empty(rings.tiles, slot)
            step += 1
        mark_empty(rings.rows, 0)
        tile = Tile(tile.b, tile.c * 2 + half, tile.group, tile.split, tile.head, tile.count, tile.row)
        store_rows(dC, tile, dC0, sizes, 0, form, IN)
        store_rows(dC, tile, dC1, sizes, 1, form, IN)


@gluon.jit
def compute_dB(rings, tiles, dA_cumsum, dt, dx, dx_strides, dB, sums, sizes, form: gl.constexpr, SPLITS: gl.constexpr):
    """The consumer warpgroup of inputs' tokens j."""
    M: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    SPAN: gl.constexpr = 2 * M
    DTYPE: gl.constexpr = tiles.x.dtype
    JP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    JN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JN, 2)
    j, p = gl.arange(0, M, gl.SliceLayout(1, JP)), gl.arange(0, M, gl.SliceLayout(0, JP))
    j_operand = gl.arange(0, M, gl.SliceLayout(1, OPERAND))
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile, half = find_half(t, sizes, SPLITS)
        dB0 = gl.zeros([M, WIDTH], gl.float32, JN)
        dB1 = gl.zeros([M, WIDTH], gl.float32, JN)
        token = tile.c * SPAN + half * M + j
        to = dx + tile.b.to(gl.int64) * dx_strides[0] + tile.head * form.HEADDIM
        to_rows = gl.expand_dims(token.to(gl.int64) * dx_strides[1], 1)
        at = tile.row * SPAN
        A_j, A_operand = gl.load(dA_cumsum + at + half * M + j), gl.load(dA_cumsum + at + half * M + j_operand)
        dt_j, dt_operand = gl.load(dt + at + half * M + j), gl.load(dt + at + half * M + j_operand)
        end = gl.load(dA_cumsum + at + SPAN - 1)
        wait_full(rings.rows, turn)
        for n in range(tile.count * form.SLICES):
            slot = slot_of(rings.tiles, step)
            wait_full(rings.tiles, step)
            x_tile = get_tile(tiles.x, slot, M, M)
            v = multiply_states(tiles.B, tiles.G, slot, M, WIDTH, JP)
            v = warpgroup_mma_wait(0, deps=(v,))
            v = v * gl.expand_dims(decay((end - A_j) * LOG2E), 1)
            v_x = gl.sum(v * x_tile.load(JP).to(gl.float32), 1)
            gl.store(sums.v_x + n % form.SLICES * sums.stride + at + half * M + j, v_x)
            channel = n % form.SLICES * M + p
            inside = gl.expand_dims(token < sizes.seqlen, 1)
            if form.HEADDIM % M:
                inside = inside & gl.expand_dims(channel < form.HEADDIM, 0)
            dx_at = (to + n // form.SLICES * form.HEADDIM + to_rows) + gl.expand_dims(channel, 0)
            gl.store(dx_at, (v * gl.expand_dims(dt_j, 1)).to(DTYPE), mask=inside)
            w = decay((end - A_operand) * LOG2E) * dt_operand
            x = weigh(x_tile.load(OPERAND), gl.expand_dims(pack_weights(w, DTYPE), 1))
            dB0 = warpgroup_mma(x, get_tile(tiles.G, 2 * slot, M, WIDTH), dB0, is_async=True)
            dB1 = warpgroup_mma(x, get_tile(tiles.G, 2 * slot + 1, M, WIDTH), dB1, is_async=True)
            at = (tile.row + gl.minimum(n + 1, tile.count * form.SLICES - 1) // form.SLICES * sizes.nsub) * SPAN
            A_j, A_operand = gl.load(dA_cumsum + at + half * M + j), gl.load(dA_cumsum + at + half * M + j_operand)
            dt_j, dt_operand = gl.load(dt + at + half * M + j), gl.load(dt + at + half * M + j_operand)
            end = gl.load(dA_cumsum + at + SPAN - 1)
            dB0, dB1 = warpgroup_mma_wait(0, deps=(dB0, dB1))
            block_barrier()
            mark_empty(rings.tiles, slot)
            step += 1
        mark_empty(rings.rows, 0)
        tile = Tile(tile.b, tile.c * 2 + half, tile.group, tile.split, tile.head, tile.count, tile.row)
        store_rows(dB, tile, dB0, sizes, 0, form, JN)
        store_rows(dB, tile, dB1, sizes, 1, form, JN)


@gluon.jit
def fetch_tiles(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, rings, tiles, sizes, nstates, every, form: gl.constexpr,
                SPLITS: gl.constexpr):
    """The producer: C and B of each tile, and dy, x, H and G of each slice of its heads."""
    M: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    nheads = sizes.ngroups * sizes.heads_per_group
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile, half = find_half(t, sizes, SPLITS)
        token = (tile.c * 2 + half) * M
        wait_empty(rings.rows, turn)
        bar = rings.rows.full.index(0)
        mbarrier.expect(bar, 2 * (tile_bytes(B_desc) + tile_bytes(C_desc)))
        for part in gl.static_range(2):
            fetch_slice(C_desc, tile.b, token, tile.group * 2 + part, 2, bar, tiles.C.index(part))
            fetch_slice(B_desc, tile.b, token, tile.group * 2 + part, 2, bar, tiles.B.index(part))
        for k in range(tile.head * form.SLICES, (tile.head + tile.count) * form.SLICES):
            slot = slot_of(rings.tiles, step)
            wait_empty(rings.tiles, step)
            bar = rings.tiles.full.index(slot)
            mbarrier.expect(bar, tile_bytes(x_desc) + tile_bytes(dy_desc) + 2 * (tile_bytes(H_desc) + tile_bytes(G_desc)))
            fetch_slice(dy_desc, tile.b, token, k, form.SLICES, bar, tiles.dy.index(slot))
            fetch_slice(x_desc, tile.b, token, k, form.SLICES, bar, tiles.x.index(slot))
            before = (tile.b * nstates + tile.c * every) * nheads + k // form.SLICES
            after = (tile.b * sizes.nsub + tile.c) * nheads + k // form.SLICES
            for part in gl.static_range(2):
                async_load(H_desc, [before, k % form.SLICES * M, part * WIDTH], bar, tiles.H.index(2 * slot + part))
                async_load(G_desc, [after, k % form.SLICES * M, part * WIDTH], bar, tiles.G.index(2 * slot + part))
            step += 1


@gluon.jit(do_not_specialize=SIZES)
def hopper_ends_kernel(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dA_cumsum, dt, dx, dx_strides, dB, dC, r, v_x, s,
                       stride, ntiles, batch, seqlen, nspans, nstates, every, ngroups, heads_per_group, HEADDIM: gl.constexpr,
                       DSTATE: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr):
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, x_desc.block_shape[1], H_desc.block_shape[2])
    tiles = Tiles(allocate_tiles(dy_desc, SLOTS), allocate_tiles(x_desc, SLOTS), allocate_tiles(H_desc, 2 * SLOTS),
                  allocate_tiles(G_desc, 2 * SLOTS), allocate_tiles(C_desc, 2), allocate_tiles(B_desc, 2))
    rings = Rings(make_ring(SLOTS, 2), make_ring(1, 2))
    fence_async_shared()
    sums, sizes = Sums(r, v_x, s, stride), Sizes(ntiles, batch, seqlen, nspans, ngroups, heads_per_group, None)
    gl.warp_specialize([
        (compute_dC, (rings, tiles, dA_cumsum, dC, sums, sizes, FORM, SPLITS)),
        (compute_dB, (rings, tiles, dA_cumsum, dt, dx, dx_strides, dB, sums, sizes, FORM, SPLITS)),
        (fetch_tiles, (x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, rings, tiles, sizes, nstates, every, FORM, SPLITS)),
    ], [4, 1], [240, 24])


def hopper_ends(i: SSDInputs, x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dt: torch.Tensor, dA_cumsum: torch.Tensor,
                nstates: int, dx, dB, dC, programs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills dx and dB, dC (splits, batch, seqlen, ngroups, dstate); returns v . x; r, with a part more for `hopper_pairs`; s.

    nstates: of each row that H_desc describes.
    """
    nspans, slices = dt.shape[2], cdiv(i.headdim, SUB_CHUNK)
    v_x, r = dt.new_empty(2 * slices + 1, *dt.shape).split((slices, slices + 1))
    s = dt.new_empty(*dt.shape[:3], 2 * slices)
    ntiles = 2 * i.batch * nspans * i.ngroups * dB.shape[0]
    programs = min(ntiles, max(1, programs // 2 * 2))  # halves of a span side by side
    launch(
        hopper_ends_kernel, programs, x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dA_cumsum, dt, dx, dx.stride()[:2],
        dB, dC, r, v_x, s, dt.numel(), ntiles, i.batch, i.seqlen, nspans, nstates,
        1 if nstates == nspans else SPAN // SUB_CHUNK, i.ngroups, i.nheads // i.ngroups, HEADDIM=i.headdim, DSTATE=i.dstate,
        SPLITS=dB.shape[0], SLOTS=SLOTS, num_warps=4, maxnreg=_REGISTERS)
    return v_x, r, s
