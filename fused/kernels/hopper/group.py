"""hopper_group: a group's gradients of a sub-chunk, in Gluon, for Hopper.

The paper's stages chunk_scan_bwd_dC, chunk_scan_bwd_dcb, bmm_chunk_bwd, chunk_scan_chunk_state_bwd_dx, chunk_state_bwd_db and
chunk_scan_bwd_ddAcs in one kernel; equations (18), (19), (21), (22), (24), (30) to (32) of docs/ssd.md. A block takes tiles: a
sub-chunk of 64 tokens of one group each, or of a split of its heads. It takes their heads in order and keeps sums over heads in
registers. A role is a group of warps with one job; rows are tokens i or j:

    compute_dC (1 warpgroup): K_ij = (dy_i . x_j) exp(A_i - A_j) dt_j,  dCB += K,  dC += (dy exp(A_i)) H,  r + row
    compute_dx (1 warpgroup): u + v = (B C^T exp(A_i - A_j)) dy + exp(A_last - A_j) B G^T,  dx,  (u + v) . x,  q,  col,  dy . x
    compute_dB (1 warpgroup): dB += (x dt_j exp(A_last - A_j)) G,  s = exp(A_last) <H, G>
    fetch_vectors (2 warps):  factors of decays and dt of each head, as vectors in shared memory
    fetch_tiles (1 warp):     x, dy, H and G of each head by TMA, and before a tile's heads its B and C

with A = dA_cumsum, H the state before the sub-chunk, G the gradient of that after it. Three rings connect the roles: `tiles`,
which fetch_tiles fills and the warpgroups read; `vectors`, which fetch_vectors fills for them; and `pairs` with one slot, in
which compute_dC hands dCB to compute_dB at the end of a tile.

B and C take the places of an H and a G in a slot of `tiles` that is kept until the tile is done, while the heads go round
through the others: so the next tile's are there before this one is done. Pairs of a token with itself cancel in row - col and
are in neither; u gets them as (B_j . C_j) dy_j. A dstate above 128, of documents with states, takes a launch for each part of
it: all but dB and dC is a sum over parts, so the second launch adds dx and the sums that the first one wrote. `span_backward`
has the rest.

Reads x, dy (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, and H, G (batch, nsub,
nheads, headdim, dstate), the state before each sub-chunk and the gradient of that after it, in the same dtype, through TMA
descriptors that fill rows past seqlen with 0; dt, dA_cumsum (batch, nheads, nsub, 64) fp32; D (nheads,). Writes dx as x; dB,
dC contiguous (splits, batch, seqlen, ngroups, dstate); sums (5, batch, nheads, nsub, 64) fp32: (u + v) . x, q, r + row, col,
dy . x; and s (batch, nheads, nsub) fp32.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ssd.kernels.arguments import cdiv, contiguous
from ssd.runtime.gluon_names import async_load, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .documents import TOKEN, load_field
from .factors import Factors, decay_pairs, decay_to_end, decay_tokens, load_root
from .group_tiles import Rings, Sizes, Sums, Tiles, as_box, fetch_vectors, find_tile, get_token, store_rows, write_dx
from .ring import make_barriers, make_ring, mark_empty, mark_full, next_empty, next_full, slot_of, wait_empty, wait_full
from .roles import LOG2E, allocate_tiles, decay, fetch_slice, get_tile, make_form, tile_bytes
from .weights import pack_weights, weigh

# One kernel for all sizes: that a size is 1 or divisible by 16 would not make it faster. Offsets into sums are int32, as in
# `ends` and `pairs`: `hopper.cannot_run` refuses more.
SIZES = ("ntiles", "batch", "seqlen", "nsub", "ngroups", "heads_per_group")
SLOTS, LINES = 4, 3  # slots of the ring of tiles, and of that of vectors
# Of a thread at launch; the roles then share them out: 192 dC, 168 dx, 128 dB, 24 the rest. With fewer for dB, ptxas runs every
# wgmma of the kernel by itself (docs/log/hopper-group.md).
_REGISTERS = 128


@gluon.jit
def compute_dC(rings, tiles, vectors, dC, sums, before, sizes, form: gl.constexpr, PART: gl.constexpr, SPLITS: gl.constexpr):
    """The consumer warpgroup with tokens i as rows: dC, dCB, and what the decay gets from outputs."""
    BLOCK_M: gl.constexpr = tiles.x.shape[2]
    ROWS: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    DTYPE: gl.constexpr = tiles.x.dtype
    IJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    IP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    IN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, IJ, 2)
    i, j = gl.arange(0, BLOCK_M, gl.SliceLayout(1, IJ)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, IJ))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile = find_tile(t, sizes, SPLITS)
        kept, phases = next_full(slot, kept, phases, rings.tiles)
        slot = kept
        B, C = get_tile(tiles.H, kept, BLOCK_M, WIDTH), get_tile(tiles.G, kept, BLOCK_M, WIDTH)
        CB = warpgroup_mma(C, B.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ), use_acc=False, is_async=True)
        CB = warpgroup_mma_wait(0, deps=(CB,))
        tiles.CB.store(gl.where(gl.expand_dims(i, 1) > gl.expand_dims(j, 0), CB, 0.0))
        sum_dCB = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ)
        sum_dC = gl.zeros([BLOCK_M, WIDTH], gl.float32, IN)
        slice_before = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, IJ))  # of the slice before, of the same head
        for k in range(tile.count * form.SLICES):
            line = slot_of(rings.vectors, step)
            at = (tile.row + k // form.SLICES * sizes.nsub) * BLOCK_M
            if PART:
                output_before = gl.load(before.output + at + i)
            slot, phases = next_full(slot, kept, phases, rings.tiles)
            x, H = get_tile(tiles.x, slot, BLOCK_M, ROWS), get_tile(tiles.H, slot, ROWS, WIDTH)
            dy_tile = get_tile(tiles.dy, slot, BLOCK_M, ROWS)
            dy = dy_tile.load(OPERAND)
            K = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ)
            K = warpgroup_mma(dy, x.permute((1, 0)), K, use_acc=False, is_async=True)
            wait_full(rings.vectors, step)
            root = load_root(vectors, line, gl.SliceLayout(1, IJ))
            w = gl.expand_dims(decay_tokens(vectors.of_i.index(line).load(gl.SliceLayout(1, OPERAND)), root), 1)
            sum_dC = warpgroup_mma(weigh(dy, pack_weights(w, DTYPE)), H, sum_dC, is_async=True)
            K = warpgroup_mma_wait(1, deps=(K,))
            of_i = vectors.of_i.index(line).load(gl.SliceLayout(1, IJ))
            of_j = gl.expand_dims(vectors.of_j.index(line).load(gl.SliceLayout(0, IJ)), 0)
            # Factors to the bit as in compute_dx, or row - col would keep what A is rounded by (docs/ssd.md).
            K = decay_pairs(K, gl.expand_dims(of_i, 1), of_j, root)
            K *= gl.expand_dims(vectors.dt.index(line).load(gl.SliceLayout(0, IJ)), 0)
            sum_dCB += K
            outputs = gl.sum(K * tiles.CB.load(IJ), 1)
            CH = warpgroup_mma(C, H.permute((1, 0)), gl.zeros([BLOCK_M, ROWS], gl.float32, IP), use_acc=False, is_async=True)
            dy_f = dy_tile.load(IP).to(gl.float32)
            sum_dC, CH = warpgroup_mma_wait(0, deps=(sum_dC, CH))
            r = gl.convert_layout(gl.sum(dy_f * CH, 1), gl.SliceLayout(1, IJ))
            outputs += r * decay_tokens(of_i, root)
            if form.SLICES == 2:
                outputs = outputs + slice_before * (k % 2).to(gl.float32)
                slice_before = outputs
            if PART:
                outputs += output_before
            gl.store(sums.output + at + i, outputs)
            # not before what was loaded from the stage has been used: a barrier does not wait for loads
            # (docs/log/hopper-group.md)
            block_barrier()
            mark_empty(rings.tiles, slot)
            mark_empty(rings.vectors, line)
            step += 1
        dCB = gl.where(gl.expand_dims(i, 1) >= gl.expand_dims(j, 0), sum_dCB, 0.0).to(DTYPE)
        wait_empty(rings.pairs, turn)
        tiles.dCB.store(dCB)
        fence_async_shared()
        block_barrier()
        mark_full(rings.pairs, 0)
        sum_dC = warpgroup_mma(gl.convert_layout(dCB, OPERAND), B, sum_dC, is_async=True)
        sum_dC = warpgroup_mma_wait(0, deps=(sum_dC,))
        block_barrier()
        mark_empty(rings.tiles, kept)
        store_rows(dC, tile, sum_dC, sizes, PART, form, IN)


@gluon.jit
def compute_dx(dx_desc, dx_at, rings, tiles, vectors, D, sums, before, sizes, form: gl.constexpr, PART: gl.constexpr,
               SPLITS: gl.constexpr):
    """The consumer warpgroup with tokens j as rows: dx and all that is summed over a token's channels."""
    BLOCK_M: gl.constexpr = tiles.x.shape[2]
    ROWS: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.G.shape[3]
    DTYPE: gl.constexpr = tiles.x.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JI, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, JI)
    j, i = gl.arange(0, BLOCK_M, ROW), gl.arange(0, BLOCK_M, gl.SliceLayout(0, JI))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        tile = find_tile(t, sizes, SPLITS)
        kept, phases = next_full(slot, kept, phases, rings.tiles)
        slot = kept
        B, C = get_tile(tiles.H, kept, BLOCK_M, WIDTH), get_tile(tiles.G, kept, BLOCK_M, WIDTH)
        BC = warpgroup_mma(B, C.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI), use_acc=False, is_async=True)
        BC = warpgroup_mma_wait(0, deps=(BC,))
        own = gl.sum(gl.where(gl.expand_dims(i, 0) == gl.expand_dims(j, 1), BC, 0.0), 1)  # B_j . C_j
        BC = gl.where(gl.expand_dims(i, 0) > gl.expand_dims(j, 1), BC, 0.0)
        u_before, v_before, dy_before = own * 0.0, own * 0.0, own * 0.0  # of the slice before, of the same head
        for k in range(tile.count * form.SLICES):
            line = slot_of(rings.vectors, step)
            at = (tile.row + k // form.SLICES * sizes.nsub) * BLOCK_M
            if PART:
                step_before, state_before = gl.load(before.step + at + j), gl.load(before.state + at + j)
                pair_before = gl.load(before.pair + at + j)
            skip = own * 0.0
            if D is not None:
                skip += gl.load(D + tile.head + k // form.SLICES).to(gl.float32)
            slot, phases = next_full(slot, kept, phases, rings.tiles)
            x_tile, dy = get_tile(tiles.x, slot, BLOCK_M, ROWS), get_tile(tiles.dy, slot, BLOCK_M, ROWS)
            G = get_tile(tiles.G, slot, ROWS, WIDTH)
            x_dy = warpgroup_mma(x_tile, dy.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI),
                                 use_acc=False, is_async=True)
            v = warpgroup_mma(B, G.permute((1, 0)), gl.zeros([BLOCK_M, ROWS], gl.float32, JI), use_acc=False, is_async=True)
            if PART:  # dx of the part before, into the tile that dx leaves from
                store_wait(0)
                block_barrier()
                mbarrier.expect(rings.dx, tile_bytes(dx_desc))
                fetch_slice(dx_desc, tile.b, get_token(tile, sizes, BLOCK_M), tile.head * form.SLICES + k, form.SLICES,
                            rings.dx, tiles.dx.index(0))
            wait_full(rings.vectors, step)
            root = load_root(vectors, line, ROW)
            of_i = gl.expand_dims(vectors.of_i.index(line).load(gl.SliceLayout(0, JI)), 0)
            of_j = vectors.of_j.index(line).load(ROW)
            L = decay_pairs(BC, of_i, gl.expand_dims(of_j, 1), root)
            dt_j = vectors.dt.index(line).load(ROW)
            pairs = gl.convert_layout(L.to(DTYPE), OPERAND)
            x_dy = warpgroup_mma_wait(1, deps=(x_dy,))
            u_x = gl.sum(L * x_dy, 1)  # u_j . x_j is a sum over pairs of weights and dy_i . x_j, as col_j is
            x = x_tile.load(JI).to(gl.float32)
            v = warpgroup_mma_wait(0, deps=(v,))
            to_end = decay_to_end(of_j, root)
            v_x = to_end * gl.sum(v * x, 1)  # before the product adds to v: after it, v would have to be copied
            u_v = warpgroup_mma(pairs, dy, v * gl.expand_dims(to_end, 1), is_async=True)
            dy_j = dy.load(JI).to(gl.float32)
            dy_x = gl.sum(dy_j * x, 1)
            skip += dt_j * own
            u_v = warpgroup_mma_wait(0, deps=(u_v,))
            dx = u_v * gl.expand_dims(dt_j, 1) + dy_j * gl.expand_dims(skip, 1)
            if form.SLICES == 2:
                second = (k % 2).to(gl.float32)
                u_x, v_x, dy_x = u_x + u_before * second, v_x + v_before * second, dy_x + dy_before * second
                u_before, v_before, dy_before = u_x, v_x, dy_x
            if PART:  # not one store for both: without a part before, that spills 32 bytes more
                gl.store(sums.step + at + j, u_x + v_x + own * dy_x + step_before)
                gl.store(sums.state + at + j, dt_j * v_x + state_before)
                gl.store(sums.pair + at + j, dt_j * u_x + pair_before)
                mbarrier.wait(rings.dx, step & 1)
                dx += get_tile(tiles.dx, 0, BLOCK_M, ROWS).load(JI).to(gl.float32)
            else:
                gl.store(sums.step + at + j, u_x + v_x + own * dy_x)
                gl.store(sums.state + at + j, dt_j * v_x)
                gl.store(sums.pair + at + j, dt_j * u_x)
                gl.store(sums.skip + at + j, dy_x)
            store_wait(0)
            block_barrier()
            get_tile(tiles.dx, 0, BLOCK_M, ROWS).store(dx.to(DTYPE))
            fence_async_shared()
            block_barrier()  # all that was loaded from the stage went into what is stored by now
            mark_empty(rings.tiles, slot)
            mark_empty(rings.vectors, line)
            write_dx(dx_desc, dx_at, tile, k, tiles, sizes, form, BLOCK_M, ROWS)
            step += 1
        block_barrier()
        mark_empty(rings.tiles, kept)
    store_wait(0)


@gluon.jit
def compute_dB(rings, tiles, vectors, dA_cumsum, dB, sums, before, sizes, form: gl.constexpr, PART: gl.constexpr,
               SPLITS: gl.constexpr):
    """The consumer warpgroup of dB; it computes s too, because it has time left."""
    BLOCK_M: gl.constexpr = tiles.x.shape[2]
    ROWS: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    DTYPE: gl.constexpr = tiles.x.dtype
    JN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JN, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, OPERAND)
    PP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    p, p_ = gl.arange(0, ROWS, gl.SliceLayout(1, PP)), gl.arange(0, ROWS, gl.SliceLayout(0, PP))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        tile = find_tile(t, sizes, SPLITS)
        kept, phases = next_full(slot, kept, phases, rings.tiles)
        slot = kept
        sum_dB = gl.zeros([BLOCK_M, WIDTH], gl.float32, JN)
        slice_before = 0.0  # of the slice before, of the same head
        for k in range(tile.count * form.SLICES):
            line = slot_of(rings.vectors, step)
            end = gl.load(dA_cumsum + (tile.row + k // form.SLICES * sizes.nsub) * BLOCK_M + BLOCK_M - 1) * LOG2E
            slot, phases = next_full(slot, kept, phases, rings.tiles)
            H, G = get_tile(tiles.H, slot, ROWS, WIDTH), get_tile(tiles.G, slot, ROWS, WIDTH)
            # <H, G> as the trace of H G^T: a product takes half the time that loading both and multiplying does
            HG = warpgroup_mma(H, G.permute((1, 0)), gl.zeros([ROWS, ROWS], gl.float32, PP), use_acc=False, is_async=True)
            HG = gl.where(gl.expand_dims(p, 1) == gl.expand_dims(p_, 0), warpgroup_mma_wait(0, deps=(HG,)), 0.0)
            trace = gl.sum(gl.sum(HG, 1), 0)
            if form.SLICES == 2:
                trace = trace + slice_before * (k % 2).to(gl.float32)
                slice_before = trace
            s = trace * decay(end)
            if PART:
                s += gl.load(before.s + tile.row + k // form.SLICES * sizes.nsub)
            gl.store(sums.s + tile.row + k // form.SLICES * sizes.nsub, s)
            wait_full(rings.vectors, step)
            root = load_root(vectors, line, TOKEN)
            w = decay_to_end(vectors.of_j.index(line).load(TOKEN), root)
            w = gl.expand_dims(w * vectors.dt.index(line).load(TOKEN), 1)
            x = weigh(get_tile(tiles.x, slot, BLOCK_M, ROWS).load(OPERAND), pack_weights(w, DTYPE))
            sum_dB = warpgroup_mma(x, G, sum_dB, is_async=True)
            sum_dB = warpgroup_mma_wait(0, deps=(sum_dB,))
            block_barrier()
            mark_empty(rings.tiles, slot)
            mark_empty(rings.vectors, line)
            step += 1
        wait_full(rings.pairs, turn)
        sum_dB = warpgroup_mma(tiles.dCB.permute((1, 0)), get_tile(tiles.G, kept, BLOCK_M, WIDTH), sum_dB, is_async=True)
        sum_dB = warpgroup_mma_wait(0, deps=(sum_dB,))
        block_barrier()
        mark_empty(rings.pairs, 0)
        mark_empty(rings.tiles, kept)
        store_rows(dB, tile, sum_dB, sizes, PART, form, JN)


@gluon.jit
def fetch_tiles(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, ring, tiles, sizes, form: gl.constexpr, PART: gl.constexpr,
                SPLITS: gl.constexpr):
    """The producer: B and C of each tile in the places of an H and a G, then x, dy, H and G of each of its heads."""
    BLOCK_M: gl.constexpr = tiles.x.shape[2]
    ROWS: gl.constexpr = tiles.H.shape[2]
    WIDTH: gl.constexpr = tiles.H.shape[3]
    nheads = sizes.ngroups * sizes.heads_per_group
    slot, kept, phases = -1, -1, 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        tile = find_tile(t, sizes, SPLITS)
        kept, phases = next_empty(slot, kept, phases, ring)
        slot = kept
        bar = ring.full.index(kept)
        mbarrier.expect(bar, tile_bytes(B_desc) + tile_bytes(C_desc))
        part = tile.group * form.PARTS + PART
        token = get_token(tile, sizes, BLOCK_M)
        fetch_slice(B_desc, tile.b, token, part, form.PARTS, bar, as_box(tiles.H.index(kept), B_desc))
        fetch_slice(C_desc, tile.b, token, part, form.PARTS, bar, as_box(tiles.G.index(kept), C_desc))
        for k in range(tile.head * form.SLICES, (tile.head + tile.count) * form.SLICES):
            slot, phases = next_empty(slot, kept, phases, ring)
            bar = ring.full.index(slot)
            mbarrier.expect(bar, tile_bytes(x_desc) + tile_bytes(dy_desc) + tile_bytes(H_desc) + tile_bytes(G_desc))
            fetch_slice(x_desc, tile.b, token, k, form.SLICES, bar, tiles.x.index(slot))
            fetch_slice(dy_desc, tile.b, token, k, form.SLICES, bar, tiles.dy.index(slot))
            state = (tile.b * sizes.nsub + tile.c) * nheads + k // form.SLICES
            async_load(H_desc, [state, k % form.SLICES * ROWS, PART * WIDTH], bar, tiles.H.index(slot))
            async_load(G_desc, [state, k % form.SLICES * ROWS, PART * WIDTH], bar, tiles.G.index(slot))


@gluon.jit(do_not_specialize=SIZES)
def hopper_group_kernel(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dA_cumsum, dt, D, dB, dC, step_sums,
                        state_sums, output_sums, pair_sums, skip_sums, s, step_before, state_before, output_before,
                        pair_before, s_before, ntiles, batch, seqlen, nsub, ngroups, heads_per_group, blocks, dx_at,
                        HEADDIM: gl.constexpr, DSTATE: gl.constexpr, PART: gl.constexpr, SPLITS: gl.constexpr,
                        SLOTS: gl.constexpr, LINES: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = H_desc.block_shape[1]
    gl.static_assert(BLOCK_M == ROWS, "B and C take the places of an H and a G")
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Xs, dYs = allocate_tiles(x_desc, SLOTS), allocate_tiles(dy_desc, SLOTS)
    Hs, Gs = allocate_tiles(H_desc, SLOTS), allocate_tiles(H_desc, SLOTS)
    CBs = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_M], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    dCBs = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_M], SQUARE)
    dXs = allocate_tiles(dx_desc, 1)
    of_i = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    of_j = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    steps = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    if PART:
        dx_bar = make_barriers(1, 1).index(0)
    else:
        dx_bar: gl.constexpr = None
    rings = Rings(make_ring(SLOTS, 3), make_ring(LINES, 3), make_ring(1, 1), dx_bar)
    fence_async_shared()
    tiles, vectors = Tiles(Xs, dYs, Hs, Gs, dXs, CBs, dCBs), Factors(of_i, of_j, steps)
    sums = Sums(step_sums, state_sums, output_sums, pair_sums, skip_sums, s)
    before = Sums(step_before, state_before, output_before, pair_before, None, s_before)
    if blocks is not None:
        ntiles = load_field(blocks, nsub, TOKEN) * ngroups * SPLITS
    sizes = Sizes(ntiles, batch, seqlen, nsub, ngroups, heads_per_group, blocks)
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, H_desc.block_shape[2])
    SLICES: gl.constexpr = FORM.SLICES
    gl.warp_specialize([
        (compute_dC, (rings, tiles, vectors, dC, sums, before, sizes, FORM, PART, SPLITS)),
        (compute_dx, (dx_desc, dx_at, rings, tiles, vectors, D, sums, before, sizes, FORM, PART, SPLITS)),
        (compute_dB, (rings, tiles, vectors, dA_cumsum, dB, sums, before, sizes, FORM, PART, SPLITS)),
        (fetch_vectors, (rings.vectors, vectors, dA_cumsum, dt, sizes, SLICES, BLOCK_M, SPLITS, True)),
        (fetch_tiles, (x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, rings.tiles, tiles, sizes, FORM, PART, SPLITS)),
    ], [4, 4, 2, 1], [168, 128, 24, 24])


def hopper_group(i: SSDInputs, x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dt, dA_cumsum, dB, dC, programs: int,
                 blocks: torch.Tensor | None = None, dx: torch.Tensor | None = None):
    """Fills what dx_desc describes, and dB, dC (splits, batch, seqlen, ngroups, dstate); returns Sums.

    A launch for each part of dstate; all but the first add dx and the sums of the one before.
    """
    splits, nsub = dB.shape[0], dt.shape[2]
    ntiles = i.batch * nsub * i.ngroups * splits
    skip, before = torch.empty_like(dt), None
    for part in range(cdiv(i.dstate, H_desc.block_shape[-1])):
        step, state, output, pair = torch.empty(4, *dt.shape, device=dt.device, dtype=torch.float32)
        sums = Sums(step, state, output, pair, skip, torch.empty(dt.shape[:3], device=dt.device, dtype=torch.float32))
        launch(
            hopper_group_kernel, min(ntiles, programs), x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dA_cumsum, dt,
            None if part else contiguous(i.D), dB, dC, *sums, *((None,) * 5 if before is None else (*before[:4], before.s)),
            ntiles, i.batch, i.seqlen, nsub, i.ngroups, i.nheads // i.ngroups, blocks,
            None if blocks is None else dx, HEADDIM=i.headdim, DSTATE=i.dstate, PART=part,
            SPLITS=splits, SLOTS=SLOTS, LINES=LINES, num_warps=4, maxnreg=_REGISTERS)
        before = sums
    return sums
