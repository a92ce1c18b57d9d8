"""hopper_scan: the paper's bmm_chunk, chunk_state, state_passing and chunk_scan in one kernel, in Gluon, for Hopper.

Equations (26) to (28) of docs/ssd.md. A block holds two slices of states S, mostly of two neighbouring heads, in registers and
walks runs of sub-chunks of 64 tokens (`roles` says what slices and runs are). A role is a group of warps with one job.
Everything is transposed against (26), so that S and x are wgmma's operand in registers, and only B, C and L pass through shared
memory:

    make_masks (1 warpgroup):       L_h = (B C^T) exp(A_i - A_j) dt_j for i >= j, [j, i], for its heads from one B C^T
    scan_slice (1 warpgroup each):  y^T = (S C^T) exp(A_i) + x^T L + D x^T
                                    S  <- exp(A_last) S + (x dt_j exp(A_last - A_j))^T B
    fetch_tiles (1 warp):           B, C and x of both slices by TMA

with i, j tokens of the sub-chunk, A = dA_cumsum, y [i, headdim], S [headdim, dstate]. Two rings connect the roles: `tiles`,
which fetch_tiles fills and the other three read, and `masks`, a lane a head, which make_masks fills and scan_slice reads. Of
documents with states, a dstate above 128 takes a launch for each part of it (`roles` says what parts are): the first has D, the
next adds the output before it, the last has the gate; hopper_wide_scan scans all others. With norm_weight it also multiplies
what was gated by the weight of a norm, and writes sums of its squares for the norm's factor, (N9) of docs/block.md.

Reads x, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), bf16 or fp16, channels and heads contiguous,
through TMA descriptors that fill rows past seqlen with 0; dt, dA_cumsum (batch, nheads, nsub, 64) fp32, dA_cumsum restarting
every sub-chunk; D (nheads,) or (nheads, headdim); initial_states (batch, nheads, headdim, dstate); ends, factors as
hopper_pieces writes them.
Writes out as x, final_states (batch, nheads, headdim, dstate) fp32, and the state before every sub-chunk, (batch, nsub, nheads,
headdim, dstate); or starts each run from one of `starts`, such states of every EVERY sub-chunks. With `asked` it writes the
states after every so many sub-chunks instead, (batch, nasked, nheads, headdim, dstate).
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
from ssd.runtime.gluon_names import async_store, block_barrier, store_wait
from ssd.runtime.launch import launch
from ssd.types import SUB_CHUNK, SSDInputs

from .documents import (
    BEGUN,
    COUNT,
    ENDED,
    TOKEN,
    Documents,
    get_run,
    load_document_state,
    load_field,
    prefetch_document_states,
    store_document_state,
    write_block,
)
from .early import may_begin_early, wait_for_last
from .masks import are_freed_with_tiles, make_masks
from .ring import make_ring, mark_empty, slot_of, wait_empty, wait_full
from .roles import (
    LOG2E,
    allocate_tiles,
    fetch_slice,
    get_head,
    get_tile,
    locate_state,
    make_form,
    make_gate,
    state_mask,
    store_masked,
    tile_bytes,
    write_slice,
)
from .scan_tiles import (
    DeferredNorm,
    Outputs,
    Rings,
    Tiles,
    Work,
    allocate_norm,
    allocate_vectors,
    begin_sums,
    load_channels,
    load_D,
    write_asked_state,
    write_sums,
)
from .start import Start, add_pieces, load_start
from .weights import add_multiple


class Slots(NamedTuple):
    """How many each ring has; of `masks`, for each head."""

    tiles: int
    masks: int


# One kernel for all sizes: that a size is 1 or divisible by 16 would not make it faster.
SIZES = ("nruns", "nsub", "nheads", "heads_per_group", "asked", "nasked")
_SLOTS = Slots(3, 2), Slots(2, 2), Slots(2, 1), Slots(1, 1)  # the first that fits
_SLICE = 64  # channels
_TURNED = 16384  # bytes in which Triton turns states from memory into another layout, of every size and dtype
_SQUARES = 2 * _SLICE * (2 * SUB_CHUNK + 8)  # bytes of `DeferredNorm`
_SHARED = 232448 - 1024  # bytes of a block, less what mbarriers and alignment may take
_REGISTERS = 128  # of a thread at launch; the roles then share them out: 192 scan_slice, 104 make_masks, 24 fetch_tiles


@gluon.jit
def fetch_tiles(x_desc, B_desc, C_desc, z_desc, before_desc, ring, tiles, work, PART: gl.constexpr, form: gl.constexpr):
    """The producer: of each sub-chunk B, C, and of both slices x, z and the output so far, into the next free slot."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = 2 * (tile_bytes(B_desc) + tile_bytes(x_desc) + tile_bytes(z_desc) + tile_bytes(before_desc))
    step = 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_run(work, k)
        group = get_head(run.pair, 0, work.heads_per_group, form) // work.heads_per_group
        for c in range(run.first, run.last):
            if work.documents.blocks is not None:
                token = load_field(work.documents.blocks, c, TOKEN)
                prefetch_document_states(work.documents.initial_states, load_field(work.documents.blocks, c, BEGUN), run.pair,
                                         work.nheads, work.heads_per_group, form)
            slot = slot_of(ring, step)
            wait_empty(ring, step)
            bar = ring.full.index(slot)
            mbarrier.expect(bar, BYTES)
            if work.documents.blocks is None:
                token = c * BLOCK_M
            fetch_slice(B_desc, run.b, token, group * form.PARTS + PART, form.PARTS, bar, tiles.B.index(slot))
            fetch_slice(C_desc, run.b, token, group * form.PARTS + PART, form.PARTS, bar, tiles.C.index(slot))
            for u in gl.static_range(2):
                head_slice = get_head(run.pair, u, work.heads_per_group, form) * form.SLICES + u * (form.SLICES - 1)
                fetch_slice(x_desc, run.b, token, head_slice, form.SLICES, bar, tiles.x.index(2 * slot + u))
                if z_desc is not None:
                    fetch_slice(z_desc, run.b, token, head_slice, form.SLICES, bar, tiles.z.index(2 * slot + u))
                if before_desc is not None:
                    fetch_slice(before_desc, run.b, token, head_slice, form.SLICES, bar, tiles.before.index(2 * slot + u))
            step += 1


@gluon.jit
def scan_slice(outputs, rings, tiles, vectors, dA_cumsum, D, norm, start, work, form: gl.constexpr, U: gl.constexpr,
               PART: gl.constexpr, EVERY: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The consumer warpgroup of slice U of a pair: its state and its output."""
    SLICE: gl.constexpr = U if form.SLICES == 2 else 0
    HEAD: gl.constexpr = U - SLICE  # the lane of `masks`
    HEADS: gl.constexpr = 2 // form.SLICES
    DTYPE: gl.constexpr = tiles.x.dtype
    PI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # y^T
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PI, 2)
    FREED: gl.constexpr = are_freed_with_tiles(rings.tiles.full.shape[0], rings.masks.full.shape[0] // HEADS)
    step = 0
    if start.ends is None:
        wait_for_last()
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_run(work, k)
        b, first, last = run.b, run.first, run.last
        h = get_head(run.pair, U, work.heads_per_group, form)
        bh = (b * work.nheads + h).to(gl.int64)
        state = load_start(start, run, h, bh, work, SLICE, PART, EVERY, STATE, form, ROWS, WIDTH)
        state = add_pieces(state, start.ends, start.factors, run, STATE, U, ROWS, WIDTH, PART, form.PARTS)
        A_last = dA_cumsum + bh * work.nsub * BLOCK_M + BLOCK_M - 1
        end = gl.load(A_last + first * BLOCK_M)
        if D is not None:
            D_h = load_D(D, h, SLICE, form, PI, ROWS)
        if norm.weight is not None:
            weight = load_channels(norm.weight, h, SLICE, form, PI, ROWS)
        for c in range(first, last):
            if work.documents.blocks is not None:
                # loaded where they are used, for want of registers: fetch_tiles has just brought the block's row into L1
                begun = load_field(work.documents.blocks, c, BEGUN)
                if begun >= 0:
                    state = load_document_state(work.documents.initial_states, begun, h, work.nheads, STATE, SLICE, PART, form,
                                                ROWS, WIDTH)
            slot, mask = slot_of(rings.tiles, step), slot_of(rings.masks, step, HEAD, HEADS)
            if outputs.states is not None and outputs.asked is None:
                # the wait for the store of y, below, was one for that of the last state too
                get_tile(tiles.states, U, ROWS, WIDTH).store(state.to(outputs.states.dtype))
                fence_async_shared()
                block_barrier()
                at = (b * work.nsub + c) * work.nheads + h
                async_store(outputs.states, [at, SLICE * ROWS, PART * WIDTH], tiles.states.index(U))
            wait_full(rings.tiles, step)
            B, C = get_tile(tiles.B, slot, BLOCK_M, WIDTH), get_tile(tiles.C, slot, BLOCK_M, WIDTH)
            x_t = get_tile(tiles.x, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0))
            x = x_t.load(OPERAND)
            S = gl.convert_layout(state.to(DTYPE), OPERAND)
            state = state * gl.exp2(end * LOG2E)
            wait_full(rings.masks, step, HEAD, HEADS)
            w = gl.expand_dims(vectors.to_end.index(mask).load(gl.SliceLayout(0, OPERAND)), 0)
            x_end = (x.to(gl.float32) * w).to(DTYPE)
            end = gl.load(A_last + gl.minimum(c + 1, last - 1) * BLOCK_M)
            y = gl.zeros([ROWS, BLOCK_M], gl.float32, PI)
            y = warpgroup_mma(S, C.permute((1, 0)), y, use_acc=False, is_async=True)  # [P, N] @ [N, M]
            w = gl.expand_dims(vectors.from_start.index(mask).load(gl.SliceLayout(0, PI)), 0)
            y, S = warpgroup_mma_wait(0, deps=(y, S))
            y = y * w
            # both products in flight before anything else touches an accumulator: ptxas would insert a wait
            y = warpgroup_mma(x, tiles.L.index(mask), y, is_async=True)  # [P, M] @ [M, M]
            state = warpgroup_mma(x_end, B, state, is_async=True)  # [P, M] @ [M, N]
            if tiles.z is not None:  # made while both products run
                gate = make_gate(get_tile(tiles.z, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0)).load(PI))
            y, x = warpgroup_mma_wait(1, deps=(y, x))  # y leaves while the state's product runs
            if D is not None:
                y = add_multiple(y, x_t.load(PI), D_h)  # read again: x does not fit beside the accumulators
            if tiles.before is not None:
                y = add_multiple(y, get_tile(tiles.before, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0)).load(PI), 1.0)
            store_wait(0)
            block_barrier()
            if not FREED:
                mark_empty(rings.masks, mask)
            if outputs.y is not None:
                get_tile(tiles.y, 2 + U, BLOCK_M, ROWS).permute((1, 0)).store(y.to(DTYPE))
            if tiles.z is not None:
                y *= gate
            if norm.weight is not None:
                get_tile(norm.squares, U, BLOCK_M, ROWS).permute((1, 0)).store((y * y).to(DTYPE))
                y *= weight
            get_tile(tiles.y, U, BLOCK_M, ROWS).permute((1, 0)).store(y.to(DTYPE))
            state, x_end = warpgroup_mma_wait(0, deps=(state, x_end))
            fence_async_shared()
            block_barrier()
            # not before y is there: a load from x that is only on its way would find the next tile (docs/log/hopper-scan.md)
            mark_empty(rings.tiles, slot)
            if norm.weight is not None:
                sums = begin_sums(norm, U, BLOCK_M, ROWS)
            if work.documents.blocks is not None:
                token, count = load_field(work.documents.blocks, c, TOKEN), load_field(work.documents.blocks, c, COUNT)
                write_block(outputs.out, outputs.out_at, token, count, h, SLICE, work.nheads, form, tiles.y, U, BLOCK_M, ROWS)
                if outputs.y is not None:
                    write_block(outputs.y, outputs.y_at, token, count, h, SLICE, work.nheads, form, tiles.y, 2 + U, BLOCK_M,
                                ROWS)
                ended = load_field(work.documents.blocks, c, ENDED)
                if ended >= 0:
                    store_document_state(work.documents.final_states, state, ended, h, work.nheads, STATE, SLICE, PART, form,
                                         ROWS, WIDTH)
            else:
                write_slice(outputs.out, b, c * BLOCK_M, h * form.SLICES + SLICE, form.SLICES, tiles.y.index(U))
                if outputs.y is not None:
                    write_slice(outputs.y, b, c * BLOCK_M, h * form.SLICES + SLICE, form.SLICES, tiles.y.index(2 + U))
            if norm.weight is not None:
                write_sums(norm, sums, b * work.nsub + c, h * form.SLICES + SLICE, work.nheads * form.SLICES, BLOCK_M)
            if outputs.asked is not None:
                write_asked_state(outputs, tiles, state, b, h, c + 1, work, U, SLICE, ROWS)
            step += 1
        if outputs.final_states is not None and work.documents.blocks is None and last == work.nsub:
            at = locate_state(outputs.final_states, bh, STATE, SLICE, PART, form, ROWS, WIDTH)
            store_masked(at, state, state_mask(STATE, SLICE, PART, form, ROWS, WIDTH))
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_scan_kernel(x_desc, B_desc, C_desc, z_desc, before_desc, out_desc, y_desc, states_desc, dA_cumsum, dt, D,
                       initial_states, ends, factors, final_states, starts, runs, nruns, nsub, nheads, heads_per_group,
                       asked, nasked, blocks, out_at, y_at, norm_weight, sums, HEADDIM: gl.constexpr, DSTATE: gl.constexpr,
                       PART: gl.constexpr, ODD: gl.constexpr, D_ROWS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
                       EVERY: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[-1]
    WIDTH: gl.constexpr = B_desc.block_shape[-1]
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, WIDTH, ODD, D_ROWS)
    gl.static_assert(WIDTH <= 128, "make_masks packs the weights of a wider scan")
    HEADS: gl.constexpr = 2 // FORM.SLICES
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    Xs = allocate_tiles(x_desc, 2 * STAGES)
    Bs = allocate_tiles(B_desc, STAGES)
    Cs = allocate_tiles(C_desc, STAGES)
    Ls = gl.allocate_shared_memory(DTYPE, [HEADS * SLOTS, BLOCK_M, BLOCK_M], SQUARE)
    Ys = allocate_tiles(out_desc, 2 if y_desc is None else 4)
    Zs = allocate_tiles(z_desc, 2 * STAGES)
    befores = allocate_tiles(before_desc, 2 * STAGES)
    Ss = allocate_tiles(states_desc, 2)
    vectors = allocate_vectors(HEADS * SLOTS, HEADS, BLOCK_M)
    norm = DeferredNorm(None, None, None, None)  # which Triton 3.6.0 cannot return
    if norm_weight is not None:
        norm = allocate_norm(norm_weight, sums, out_desc, ROWS)
    rings = Rings(make_ring(STAGES, 3), make_ring(HEADS * SLOTS, FORM.SLICES))
    fence_async_shared()
    tiles = Tiles(Xs, Bs, Cs, Zs, befores, Ls, Ys, Ss)
    if blocks is None:
        documents = Documents(None, None, None, None, None)
        start = Start(initial_states, ends, factors, starts, None)
    else:
        documents = Documents(blocks, load_field(blocks, nsub, TOKEN), initial_states, None, final_states)
        start = Start(None, ends, factors, None, None)
    work = Work(runs, nruns, nsub, nheads, heads_per_group, documents)
    outputs = Outputs(out_desc, y_desc, states_desc, final_states, out_at, y_at, asked, nasked)
    gl.warp_specialize([
        (scan_slice, (outputs, rings, tiles, vectors, dA_cumsum, D, norm, start, work, FORM, 0, PART, EVERY, BLOCK_M, ROWS,
                      WIDTH)),
        (scan_slice, (outputs, rings, tiles, vectors, dA_cumsum, D, norm, start, work, FORM, 1, PART, EVERY, BLOCK_M, ROWS,
                      WIDTH)),
        (make_masks, (rings, tiles, vectors, dA_cumsum, dt, start, work, FORM, False, BLOCK_M, WIDTH)),
        (fetch_tiles, (x_desc, B_desc, C_desc, z_desc, before_desc, rings.tiles, tiles, work, PART, FORM)),
    ], [4, 4, 1], [192, 104, 24])


def choose_slots(ways: tuple[Slots, ...], i: SSDInputs, width: int, beside: int, keeps_y: bool, columns: int, starts,
                 more: int = 0) -> Slots:
    """The first of `ways` that shared memory holds, or the last.

    width: states of a tile of B; beside: bytes of an element of all the tiles that each slot has beside x, B and C; keeps_y:
    whether y goes out too; columns: states of the tiles that states leave from, or 0; more: bytes of all else.
    """
    heads = 1 if i.headdim > _SLICE else 2
    tile, line = 2 * SUB_CHUNK * _SLICE, 4 * SUB_CHUNK  # elements of both slices, bytes of a vector
    more += 2 * _SLICE * columns * i.states_dtype.itemsize + (0 if starts is None else _TURNED)
    for slots in ways:
        ring = slots.tiles * (tile * (2 + beside) + 2 * 2 * SUB_CHUNK * width)
        masks = heads * (slots.masks * (2 * SUB_CHUNK**2 + 2 * line) + 2 * line)
        if ring + masks + 2 * tile * (1 + keeps_y) + more <= _SHARED:
            break
    return slots


def hopper_scan(i: SSDInputs, x_desc, B_desc, C_desc, out_desc, dt, dA_cumsum, runs: torch.Tensor, initial_states=None,
                ends=None, factors=None, final_states=None, states_desc=None, starts=None, every: int = SUB_CHUNK, z_desc=None,
                y_desc=None, nasked: int | None = None, blocks: torch.Tensor | None = None, out: torch.Tensor | None = None,
                y: torch.Tensor | None = None, norm_weight: torch.Tensor | None = None,
                sums: torch.Tensor | None = None) -> None:
    """Fills what out_desc and states_desc describe, and final_states, the last two where given; y_desc: out without the gate.

    norm_weight, sums: of `DeferredNorm`, the second filled. Both or neither; with z and a dstate of one part.

    blocks: those of documents, in place of sub-chunks; initial_states and final_states are then the documents'. out, y: what
    out_desc and y_desc describe.
    nasked: how many states of `i.return_states_every` a row of states_desc has; None: it has one for each sub-chunk.

    runs: (blocks, nruns, 6) int32. starts: a state every `every` tokens; runs begin there if they start from them. A launch for
    each part of dstate: the first has D in it, the next adds the output before it, the last has the gate.
    """
    parts, heads_per_group = cdiv(i.dstate, B_desc.block_shape[-1]), i.nheads // i.ngroups
    asked = None if nasked is None else i.return_states_every // dt.shape[3]
    for part in range(parts):
        z, kept = (z_desc, y_desc) if part == parts - 1 else (None, None)
        before = out_desc if part else None
        beside = sum(desc.base.itemsize for desc in (z, before) if desc is not None)
        slots = choose_slots(_SLOTS, i, B_desc.block_shape[-1], beside, kept is not None,
                             0 if states_desc is None else states_desc.block_shape[-1], starts, 0 if sums is None else _SQUARES)
        launch(
            hopper_scan_kernel, runs.shape[0], x_desc, B_desc, C_desc, z, before, out_desc, kept, states_desc, dA_cumsum, dt,
            None if part else i.D, initial_states, ends, factors, final_states, starts, runs, runs.shape[1],
            dt.shape[2], i.nheads, heads_per_group, asked, nasked, blocks, out,
            None if kept is None else y, norm_weight, sums, HEADDIM=i.headdim, DSTATE=i.dstate, PART=part,
            ODD=heads_per_group % 2 == 1, D_ROWS=not part and i.has_D_of_channels, STAGES=slots.tiles,
            SLOTS=slots.masks, EVERY=every // dt.shape[3], num_warps=4, maxnreg=_REGISTERS,
            launch_pdl=part == 0 and may_begin_early(ends, blocks is None and starts is None, initial_states))
