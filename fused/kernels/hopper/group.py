"""hopper_group, equations (18), (19), (21), (22), (24), (30) to (32): a group's gradients of a sub-chunk, in Gluon, for Hopper.

A block takes tiles, a sub-chunk of 64 tokens of one group each, or of a split of its heads, and meets their heads in order.
Sums over heads stay in registers. A role for each warpgroup, the last two of two and one warps; rows are tokens i or j:

    dC [i]:  K_ij = (dy_i . x_j) exp(A_i - A_j) dt_j,  dCB += K,  dC += (dy exp(A_i)) H,  r + row
    dx [j]:  u + v = (B C^T exp(A_i - A_j)) dy + exp(A_last - A_j) B G^T,  dx,  (u + v) . x,  q,  col,  dy . x
    dB [j]:  dB += (x dt_j exp(A_last - A_j)) G,  s = exp(A_last) <H, G>
    lines:   A and dt of each head, as vectors in shared memory
    fetch:   x, dy, H and G of each head by TMA into the next slot of a ring, and before a tile's heads its B and C

B and C take the places of an H and a G in a slot that is kept until the tile is done, while the heads go round through the
others: so the next tile's are there before this one is done. Pairs of a token with itself cancel in row - col and are in
neither; u gets them as (B_j . C_j) dy_j. At the end of a tile dCB goes from the first to the third through shared memory.

Reads x, dy (batch, seqlen, nheads, 64), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, and H, G (batch, nsub, nheads, 64,
dstate), the state before each sub-chunk and the gradient of that after it, in the same dtype, through TMA descriptors that
fill rows past seqlen with 0; dt, dA_cumsum (batch, nheads, nsub, 64) fp32; D (nheads,). Writes dx as x; dB, dC contiguous
(splits, batch, seqlen, ngroups, dstate); sums (5, batch, nheads, nsub, 64) fp32: (u + v) . x, q, r + row, col, dy . x; and
s (batch, nheads, nsub) fp32.
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

from ssd.kernels.arguments import contiguous
from ssd.runtime.gluon_names import async_load, async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .roles import LOG2E, at_most, barriers, decay, log2, tile

# One kernel for all sizes: what divides them, or that one is 1, is of no use to it. Offsets into sums are int32: x of as many
# rows, 2^31, would take 256 GiB.
SIZES = ("ntiles", "batch", "seqlen", "nsub", "ngroups", "heads_per_group")
SLOTS, LINES = 4, 3
# A thread at launch; the roles then share them out: 192 dC, 168 dx, 128 dB, 24 the rest. With fewer for dB, ptxas runs every
# wgmma of the kernel by itself (docs/log/hopper-group.md).
_REGISTERS = 128


@gluon.jit
def load_tile(t, sizes, SPLITS: gl.constexpr):
    """Of tile t: batch row, sub-chunk, group and split; its first head and number of heads, at least one; and where that head's
    sub-chunk is in (batch, nheads, nsub). Groups of a sub-chunk are neighbours.
    """
    nsub, ngroups, heads_per_group = sizes
    slot, row = t % (ngroups * SPLITS), t // (ngroups * SPLITS)
    b, c, group, split = row // nsub, row % nsub, slot // SPLITS, slot % SPLITS
    each = (heads_per_group + SPLITS - 1) // SPLITS
    head = group * heads_per_group + split * each
    at = (b * ngroups * heads_per_group + head) * nsub + c
    return b, c, group, split, head, gl.minimum(each, heads_per_group - split * each), at


@gluon.jit
def next_slot(slot, kept, phases, bars, FREE: gl.constexpr):
    """The slot that follows, but for the one that is kept, once its barrier lets it be read, or with FREE be filled; and bit k
    of phases, the phase that the barrier of slot k is to complete, flipped for it.
    """
    SLOTS: gl.constexpr = bars.shape[0]
    slot = (slot + 1) % SLOTS
    slot = (slot + (slot == kept).to(gl.int32)) % SLOTS
    mbarrier.wait(bars.index(slot), phases >> slot & 1 ^ FREE)
    return slot, phases ^ (1 << slot)


@gluon.jit
def store_rows(t, row, c, group, values, seqlen, ngroups, LAYOUT: gl.constexpr):
    """`values` [M, N] into a contiguous (rows, seqlen, ngroups, dstate), from the layout that they are in: once a tile, and
    another one would take shared memory.
    """
    BLOCK_M: gl.constexpr = values.shape[0]
    DSTATE: gl.constexpr = values.shape[1]
    m = c * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    n = gl.arange(0, DSTATE, gl.SliceLayout(0, LAYOUT))
    token = gl.expand_dims((row.to(gl.int64) * seqlen + m) * ngroups + group, 1)
    to = t + token * DSTATE + gl.expand_dims(n, 0)
    gl.store(to, values.to(t.dtype.element_ty), mask=gl.expand_dims(m < seqlen, 1))


@gluon.jit
def dC_role(bars, rings, lines, dC, output_sums, ntiles, batch, seqlen, sizes, SPLITS: gl.constexpr):
    """The consumer warpgroup with tokens i as rows: dC, dCB, and what the decay gets from outputs."""
    full, empty, ready, used, pairs_full, pairs_empty = bars
    nsub, ngroups, _ = sizes
    Xs, dYs, Hs, Gs, CBs, dCBs = rings
    A_columns, A_rows = lines
    LINES: gl.constexpr = ready.shape[0]
    BLOCK_M: gl.constexpr = Xs.shape[2]
    HEADDIM: gl.constexpr = Xs.shape[3]
    DSTATE: gl.constexpr = Hs.shape[3]
    DTYPE: gl.constexpr = Xs.dtype
    IJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    IP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    IN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, IJ, 2)
    i, j = gl.arange(0, BLOCK_M, gl.SliceLayout(1, IJ)), gl.arange(0, BLOCK_M, gl.SliceLayout(0, IJ))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        b, c, group, split, _, count, row = load_tile(t, sizes, SPLITS)
        kept, phases = next_slot(slot, kept, phases, full, 0)
        slot = kept
        B, C = tile(Hs, kept, BLOCK_M, DSTATE), tile(Gs, kept, BLOCK_M, DSTATE)
        CB = warpgroup_mma(C, B.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ), use_acc=False, is_async=True)
        CB = warpgroup_mma_wait(0, deps=(CB,))
        CBs.store(gl.where(gl.expand_dims(i, 1) > gl.expand_dims(j, 0), CB, 0.0))
        sum_dCB = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ)
        sum_dC = gl.zeros([BLOCK_M, DSTATE], gl.float32, IN)
        for k in range(count):
            line = step % LINES
            slot, phases = next_slot(slot, kept, phases, full, 0)
            x, H = tile(Xs, slot, BLOCK_M, HEADDIM), tile(Hs, slot, HEADDIM, DSTATE)
            dy_tile = tile(dYs, slot, BLOCK_M, HEADDIM)
            dy = dy_tile.load(OPERAND)
            K = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, IJ)
            K = warpgroup_mma(dy, x.permute((1, 0)), K, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(line), (step // LINES) & 1)
            w = gl.expand_dims(decay(A_columns.index(line).load(gl.SliceLayout(1, OPERAND))), 1)
            sum_dC = warpgroup_mma((dy.to(gl.float32) * w).to(DTYPE), H, sum_dC, is_async=True)
            K = warpgroup_mma_wait(1, deps=(K,))
            A_i = A_columns.index(line).load(gl.SliceLayout(1, IJ))
            A_j = gl.expand_dims(A_rows.index(line).load(gl.SliceLayout(0, IJ)), 0)
            # above the diagonal anything finite: masked where it is used
            K *= gl.exp2(at_most(gl.expand_dims(A_i, 1) - A_j, 64.0))
            sum_dCB += K
            outputs = gl.sum(K * CBs.load(IJ), 1)
            CH = warpgroup_mma(C, H.permute((1, 0)), gl.zeros([BLOCK_M, HEADDIM], gl.float32, IP), use_acc=False, is_async=True)
            dy_f = dy_tile.load(IP).to(gl.float32)
            sum_dC, CH = warpgroup_mma_wait(0, deps=(sum_dC, CH))
            r = gl.convert_layout(gl.sum(dy_f * CH, 1), gl.SliceLayout(1, IJ))
            outputs += r * decay(A_i)
            at = (row + k * nsub) * BLOCK_M
            gl.store(output_sums + at + i, outputs)
            # not before what was loaded from the stage has been used: a barrier does not wait for loads
            # (docs/log/hopper-group.md)
            block_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(used.index(line), count=1)
            step += 1
        dCB = gl.where(gl.expand_dims(i, 1) >= gl.expand_dims(j, 0), sum_dCB, 0.0).to(DTYPE)
        mbarrier.wait(pairs_empty, turn & 1 ^ 1)
        dCBs.store(dCB)
        fence_async_shared()
        block_barrier()
        mbarrier.arrive(pairs_full, count=1)
        sum_dC = warpgroup_mma(gl.convert_layout(dCB, OPERAND), B, sum_dC, is_async=True)
        sum_dC = warpgroup_mma_wait(0, deps=(sum_dC,))
        block_barrier()
        mbarrier.arrive(empty.index(kept), count=1)
        store_rows(dC, split * batch + b, c, group, sum_dC, seqlen, ngroups, IN)


@gluon.jit
def dx_role(dx_desc, bars, rings, lines, D, sums, ntiles, sizes, SPLITS: gl.constexpr):
    """The consumer warpgroup with tokens j as rows: dx and all that is summed over a token's channels."""
    full, empty, ready, used = bars
    nsub, _, _ = sizes
    Xs, dYs, Hs, Gs, dXs = rings
    A_columns, steps = lines
    step_sums, state_sums, pair_sums, skip_sums = sums
    LINES: gl.constexpr = ready.shape[0]
    BLOCK_M: gl.constexpr = Xs.shape[2]
    HEADDIM: gl.constexpr = Xs.shape[3]
    DSTATE: gl.constexpr = Gs.shape[3]
    DTYPE: gl.constexpr = Xs.dtype
    JI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JI, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, JI)
    j, i = gl.arange(0, BLOCK_M, ROW), gl.arange(0, BLOCK_M, gl.SliceLayout(0, JI))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        b, c, _, _, head, count, row = load_tile(t, sizes, SPLITS)
        kept, phases = next_slot(slot, kept, phases, full, 0)
        slot = kept
        B, C = tile(Hs, kept, BLOCK_M, DSTATE), tile(Gs, kept, BLOCK_M, DSTATE)
        BC = warpgroup_mma(B, C.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI), use_acc=False, is_async=True)
        BC = warpgroup_mma_wait(0, deps=(BC,))
        own = gl.sum(gl.where(gl.expand_dims(i, 0) == gl.expand_dims(j, 1), BC, 0.0), 1)  # B_j . C_j
        BC = gl.where(gl.expand_dims(i, 0) > gl.expand_dims(j, 1), BC, 0.0)
        for k in range(count):
            line = step % LINES
            at = (row + k * nsub) * BLOCK_M
            skip = own * 0.0
            if D is not None:
                skip += gl.load(D + head + k).to(gl.float32)
            slot, phases = next_slot(slot, kept, phases, full, 0)
            x_tile, dy = tile(Xs, slot, BLOCK_M, HEADDIM), tile(dYs, slot, BLOCK_M, HEADDIM)
            G = tile(Gs, slot, HEADDIM, DSTATE)
            x_dy = warpgroup_mma(x_tile, dy.permute((1, 0)), gl.zeros([BLOCK_M, BLOCK_M], gl.float32, JI),
                                 use_acc=False, is_async=True)
            v = warpgroup_mma(B, G.permute((1, 0)), gl.zeros([BLOCK_M, HEADDIM], gl.float32, JI), use_acc=False, is_async=True)
            mbarrier.wait(ready.index(line), (step // LINES) & 1)
            A_i = gl.expand_dims(A_columns.index(line).load(gl.SliceLayout(0, JI)), 0)
            A_j = A_columns.index(line).load(ROW)
            L = BC * decay(A_i - gl.expand_dims(A_j, 1))
            dt_j = steps.index(line).load(ROW)
            pairs = gl.convert_layout(L.to(DTYPE), OPERAND)
            x_dy = warpgroup_mma_wait(1, deps=(x_dy,))
            u_x = gl.sum(L * x_dy, 1)  # u_j . x_j is a sum over pairs of weights and dy_i . x_j, as col_j is
            x = x_tile.load(JI).to(gl.float32)
            v = warpgroup_mma_wait(0, deps=(v,))
            to_end = decay(A_columns.index(line).slice(BLOCK_M - 1, 1).load(ROW) - A_j)
            v_x = to_end * gl.sum(v * x, 1)  # before the product adds to v: after it, v would have to be copied
            u_v = warpgroup_mma(pairs, dy, v * gl.expand_dims(to_end, 1), is_async=True)
            dy_j = dy.load(JI).to(gl.float32)
            dy_x = gl.sum(dy_j * x, 1)
            skip += dt_j * own
            u_v = warpgroup_mma_wait(0, deps=(u_v,))
            dx = u_v * gl.expand_dims(dt_j, 1) + dy_j * gl.expand_dims(skip, 1)
            gl.store(step_sums + at + j, u_x + v_x + own * dy_x)
            gl.store(state_sums + at + j, dt_j * v_x)
            gl.store(pair_sums + at + j, dt_j * u_x)
            gl.store(skip_sums + at + j, dy_x)
            store_wait(0)
            block_barrier()
            tile(dXs, 0, BLOCK_M, HEADDIM).store(dx.to(DTYPE))
            fence_async_shared()
            block_barrier()  # all that was loaded from the stage went into what is stored by now
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(used.index(line), count=1)
            async_store(dx_desc, [b, c * BLOCK_M, (head + k) * HEADDIM], dXs.index(0))
            step += 1
        block_barrier()
        mbarrier.arrive(empty.index(kept), count=1)
    store_wait(0)


@gluon.jit
def dB_role(bars, rings, lines, dA_cumsum, dB, s, ntiles, batch, seqlen, sizes, SPLITS: gl.constexpr):
    """The consumer warpgroup of dB, and of s for want of a better place."""
    full, empty, ready, used, pairs_full, pairs_empty = bars
    nsub, ngroups, _ = sizes
    Xs, Hs, Gs, dCBs = rings
    A_columns, steps = lines
    LINES: gl.constexpr = ready.shape[0]
    BLOCK_M: gl.constexpr = Xs.shape[2]
    HEADDIM: gl.constexpr = Xs.shape[3]
    DSTATE: gl.constexpr = Hs.shape[3]
    DTYPE: gl.constexpr = Xs.dtype
    JN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DSTATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, JN, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, OPERAND)
    PP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADDIM, 16])
    p, p_ = gl.arange(0, HEADDIM, gl.SliceLayout(1, PP)), gl.arange(0, HEADDIM, gl.SliceLayout(0, PP))
    step, slot, kept, phases = 0, -1, -1, 0
    for t in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        turn = t // gl.num_programs(0)
        b, c, group, split, _, count, row = load_tile(t, sizes, SPLITS)
        kept, phases = next_slot(slot, kept, phases, full, 0)
        slot = kept
        sum_dB = gl.zeros([BLOCK_M, DSTATE], gl.float32, JN)
        for k in range(count):
            line = step % LINES
            end = gl.load(dA_cumsum + (row + k * nsub) * BLOCK_M + BLOCK_M - 1) * LOG2E
            slot, phases = next_slot(slot, kept, phases, full, 0)
            H, G = tile(Hs, slot, HEADDIM, DSTATE), tile(Gs, slot, HEADDIM, DSTATE)
            # <H, G> as the trace of H G^T: a product takes half the time that loading both and multiplying does
            HG = warpgroup_mma(H, G.permute((1, 0)), gl.zeros([HEADDIM, HEADDIM], gl.float32, PP), use_acc=False, is_async=True)
            HG = gl.where(gl.expand_dims(p, 1) == gl.expand_dims(p_, 0), warpgroup_mma_wait(0, deps=(HG,)), 0.0)
            gl.store(s + row + k * nsub, gl.sum(gl.sum(HG, 1), 0) * decay(end))
            mbarrier.wait(ready.index(line), (step // LINES) & 1)
            w = gl.expand_dims(decay(end - A_columns.index(line).load(TOKEN)) * steps.index(line).load(TOKEN), 1)
            x = (tile(Xs, slot, BLOCK_M, HEADDIM).load(OPERAND).to(gl.float32) * w).to(DTYPE)
            sum_dB = warpgroup_mma(x, G, sum_dB, is_async=True)
            sum_dB = warpgroup_mma_wait(0, deps=(sum_dB,))
            block_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(used.index(line), count=1)
            step += 1
        mbarrier.wait(pairs_full, turn & 1)
        sum_dB = warpgroup_mma(dCBs.permute((1, 0)), tile(Gs, kept, BLOCK_M, DSTATE), sum_dB, is_async=True)
        sum_dB = warpgroup_mma_wait(0, deps=(sum_dB,))
        block_barrier()
        mbarrier.arrive(pairs_empty, count=1)
        mbarrier.arrive(empty.index(kept), count=1)
        store_rows(dB, split * batch + b, c, group, sum_dB, seqlen, ngroups, JN)


@gluon.jit
def lines_role(bars, lines, dA_cumsum, dt, ntiles, sizes, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """Fetches what each head's decay and steps are, as vectors: A_j, A_j less log dt_j, dt_j, in binary logs.

    Two warps, a token a thread: racecheck takes the barrier of one for none (docs/log/sanitizer.md).
    """
    ready, used = bars
    nsub, _, _ = sizes
    A_columns, A_rows, steps = lines
    LINES: gl.constexpr = ready.shape[0]
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [BLOCK_M // 32], [0]))
    step = 0
    for t in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        _, _, _, _, _, count, row = load_tile(t, sizes, SPLITS)
        at = row * BLOCK_M + m
        a, dt_k = gl.load(dA_cumsum + at), gl.load(dt + at)
        for k in range(count):
            line = step % LINES
            mbarrier.wait(used.index(line), (step // LINES) & 1 ^ 1)
            A_columns.index(line).store(a * LOG2E)
            A_rows.index(line).store(a * LOG2E - log2(dt_k))
            steps.index(line).store(dt_k)
            block_barrier()
            mbarrier.arrive(ready.index(line), count=1)
            at = (row + gl.minimum(k + 1, count - 1) * nsub) * BLOCK_M + m
            a, dt_k = gl.load(dA_cumsum + at), gl.load(dt + at)
            step += 1


@gluon.jit
def fetch_role(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, bars, rings, ntiles, sizes, SPLITS: gl.constexpr):
    """The producer: B and C of each tile in the places of an H and a G, then x, dy, H and G of each of its heads."""
    full, empty = bars
    nsub, ngroups, heads_per_group = sizes
    Xs, dYs, Hs, Gs = rings
    BLOCK_M: gl.constexpr = Xs.shape[2]
    HEADDIM: gl.constexpr = Xs.shape[3]
    DSTATE: gl.constexpr = Hs.shape[3]
    nheads = ngroups * heads_per_group
    slot, kept, phases = -1, -1, 0
    for t in range(gl.program_id(0), ntiles, gl.num_programs(0)):
        b, c, group, _, head, count, _ = load_tile(t, sizes, SPLITS)
        kept, phases = next_slot(slot, kept, phases, empty, 1)
        slot = kept
        bar = full.index(kept)
        mbarrier.expect(bar, 2 * BLOCK_M * DSTATE * 2)
        async_load(B_desc, [b, c * BLOCK_M, group * DSTATE], bar, Hs.index(kept))
        async_load(C_desc, [b, c * BLOCK_M, group * DSTATE], bar, Gs.index(kept))
        for k in range(head, head + count):
            slot, phases = next_slot(slot, kept, phases, empty, 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * HEADDIM * (BLOCK_M + DSTATE) * 2)
            async_load(x_desc, [b, c * BLOCK_M, k * HEADDIM], bar, Xs.index(slot))
            async_load(dy_desc, [b, c * BLOCK_M, k * HEADDIM], bar, dYs.index(slot))
            state = ((b * nsub + c) * nheads + k) * HEADDIM
            async_load(H_desc, [0, state, 0], bar, Hs.index(slot))
            async_load(G_desc, [0, state, 0], bar, Gs.index(slot))


@gluon.jit(do_not_specialize=SIZES)
def hopper_group_kernel(x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dA_cumsum, dt, D, dB, dC, step_sums,
                        state_sums, output_sums, pair_sums, skip_sums, s, ntiles, batch, seqlen, nsub, ngroups, heads_per_group,
                        SPLITS: gl.constexpr, SLOTS: gl.constexpr, LINES: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    HEADDIM: gl.constexpr = x_desc.block_shape[2]
    DSTATE: gl.constexpr = B_desc.block_shape[2]
    gl.static_assert(BLOCK_M == HEADDIM, "B and C take the places of an H and a G")
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Xs = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BLOCK_M, HEADDIM], x_desc.layout)
    dYs = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BLOCK_M, HEADDIM], x_desc.layout)
    Hs = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, HEADDIM, DSTATE], H_desc.layout)
    Gs = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, HEADDIM, DSTATE], H_desc.layout)
    CBs = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_M], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    dCBs = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_M], SQUARE)
    dXs = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_M, HEADDIM], x_desc.layout)
    A_columns = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    A_rows = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    steps = gl.allocate_shared_memory(gl.float32, [LINES, BLOCK_M], LINE)
    full, empty, ready, used = barriers(SLOTS, 1), barriers(SLOTS, 3), barriers(LINES, 1), barriers(LINES, 3)
    pairs_full, pairs_empty = barriers(1, 1).index(0), barriers(1, 1).index(0)
    fence_async_shared()
    sizes = (nsub, ngroups, heads_per_group)
    gl.warp_specialize([
        (dC_role, ((full, empty, ready, used, pairs_full, pairs_empty), (Xs, dYs, Hs, Gs, CBs, dCBs), (A_columns, A_rows), dC,
                   output_sums, ntiles, batch, seqlen, sizes, SPLITS)),
        (dx_role, (dx_desc, (full, empty, ready, used), (Xs, dYs, Hs, Gs, dXs), (A_columns, steps), D,
                   (step_sums, state_sums, pair_sums, skip_sums), ntiles, sizes, SPLITS)),
        (dB_role, ((full, empty, ready, used, pairs_full, pairs_empty), (Xs, Hs, Gs, dCBs), (A_columns, steps),
                   dA_cumsum, dB, s, ntiles, batch, seqlen, sizes, SPLITS)),
        (lines_role, ((ready, used), (A_columns, A_rows, steps), dA_cumsum, dt, ntiles, sizes, BLOCK_M, SPLITS)),
        (fetch_role, (x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, (full, empty), (Xs, dYs, Hs, Gs), ntiles, sizes,
                      SPLITS)),
    ], [4, 4, 2, 1], [168, 128, 24, 24])


def hopper_group(i: SSDInputs, x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dt, dA_cumsum, dB, dC, blocks: int):
    """Fills what dx_desc describes, and dB, dC (splits, batch, seqlen, ngroups, dstate); returns sums and s."""
    splits, nsub = dB.shape[0], dt.shape[2]
    ntiles = i.batch * nsub * i.ngroups * splits
    sums = torch.empty(5, *dt.shape, device=dt.device, dtype=torch.float32)
    s = torch.empty(dt.shape[:3], device=dt.device, dtype=torch.float32)
    launch(
        hopper_group_kernel, min(ntiles, blocks), x_desc, dy_desc, B_desc, C_desc, H_desc, G_desc, dx_desc, dA_cumsum, dt,
        contiguous(i.D), dB, dC, *sums, s, ntiles, i.batch, i.seqlen, nsub, i.ngroups, i.nheads // i.ngroups,
        SPLITS=splits, SLOTS=SLOTS, LINES=LINES, num_warps=4, maxnreg=_REGISTERS)
    return sums, s
