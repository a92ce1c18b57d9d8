"""hopper_wide_scan: hopper_scan for a dstate above 128, both parts of it in one launch, in Gluon, for Hopper.

The formulas, the arguments and what is read and written are those of `scan`. A warpgroup holds a slice of a state [64, 256],
which takes 128 registers of a thread. What else it needs comes one after the other: S is wgmma's operand a quarter at a time,
x is loaded when S is done with, and x^T L reads x from shared memory. So a sub-chunk has five groups of products, and each is
waited for before the next one:

    make_masks (1 warpgroup):       L_h = (B C^T) exp(A_i - A_j) dt_j for i >= j, [j, i], for its heads from one B C^T
    scan_slice (1 warpgroup each):  y^T += R_n C_n^T for each quarter n of dstate
                                    y^T <- y^T exp(A_i + lag) + x^T L
                                    lag <- lag + A_last, R <- R + (x dt_j exp(A_last - A_j - lag))^T B
                                    y^T += D x^T, and y leaves while the product with B runs
    fetch_tiles (1 warp):           B, C and x of both slices by TMA; before them the pieces that enter a run

The state is S = exp(lag) R. In bf16, where states are not written, decays are deferred in lag, and R is scaled or overwritten
as `lag` says; otherwise lag is 0, and R is scaled by exp(A_last) in each step.
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

from ssd.runtime.gluon_names import async_load, async_store, block_barrier, reinterpret, store_wait
from ssd.runtime.launch import launch
from ssd.types import SUB_CHUNK, SSDInputs

from .document_states import as_box, as_tile
from .documents import Documents
from .early import may_begin_early, wait_for_last
from .lag import apply_decay, decay_state, defers_decay
from .masks import are_freed_with_tiles, make_masks
from .ring import make_ring, mark_empty, slot_of, wait_empty, wait_full
from .roles import (
    allocate_tiles,
    fetch_slice,
    get_head,
    get_tile,
    load_run,
    locate_state,
    make_form,
    make_gate,
    state_mask,
    store_masked,
    tile_bytes,
    write_slice,
)
from .scan import SIZES, Slots, choose_slots
from .scan_tiles import Outputs, Rings, Work, allocate_vectors, load_D, split_columns
from .start import Start, add_pieces, count_together, load_scales, load_start, undo_line_up
from .weights import add_multiple, weigh

QUARTER = 64  # states that are wgmma's operand at a time, and of a tile of a state on its way out
PART = gl.constexpr(128)  # states of a part, as hopper_states has them
_SLOTS = Slots(2, 2), Slots(2, 1), Slots(1, 2), Slots(1, 1)  # the first that fits
_REGISTERS = 128  # of a thread at launch; the roles then share them out: 208 scan_slice, 72 make_masks, 24 fetch_tiles


class Tiles(NamedTuple):
    """Shared memory, by slot: x, z, B, C of `tiles`, L of `masks`; y and quarters of states on their way out."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64, headdim]: both slices of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64, 256], and C; or both slices of a piece
    C: gl.shared_memory_descriptor
    z: gl.shared_memory_descriptor  # as x, or None
    L: gl.shared_memory_descriptor  # [HEADS SLOTS, 64, 64]
    y: gl.shared_memory_descriptor  # [2, 1, 64, headdim]; [4, ...] where y before the gate goes out too
    states: gl.shared_memory_descriptor  # [4, 1, headdim, 64]: two a slice; or None


@gluon.jit
def fetch_tiles(x_desc, B_desc, C_desc, z_desc, ends_desc, ring, tiles, work, form: gl.constexpr):
    """The producer: of each sub-chunk B and C, and of both slices x and z, into the next free slot. Before a run's first come
    the pieces that enter it, one a slot: what the first slice adds in the place of B, the second's in that of C.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = 2 * (tile_bytes(B_desc) + tile_bytes(x_desc) + tile_bytes(z_desc))
    step = 0
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = load_run(work.runs, k)
        group = get_head(run.pair, 0, work.heads_per_group, form) // work.heads_per_group
        if ends_desc is not None:
            if run.npieces > 0:
                wait_for_last()
            for i in range(2 * run.piece, 2 * (run.piece + run.npieces), 2):
                slot = slot_of(ring, step)
                wait_empty(ring, step)
                bar = ring.full.index(slot)
                mbarrier.expect(bar, 2 * tile_bytes(ends_desc))
                async_load(ends_desc, [i, 0, 0], bar, as_box(tiles.B.index(slot), ends_desc))
                async_load(ends_desc, [i + 1, 0, 0], bar, as_box(tiles.C.index(slot), ends_desc))
                step += 1
        for c in range(run.first, run.last):
            slot = slot_of(ring, step)
            wait_empty(ring, step)
            bar = ring.full.index(slot)
            mbarrier.expect(bar, BYTES)
            fetch_slice(B_desc, run.b, c * BLOCK_M, group, 1, bar, tiles.B.index(slot))
            fetch_slice(C_desc, run.b, c * BLOCK_M, group, 1, bar, tiles.C.index(slot))
            for u in gl.static_range(2):
                head_slice = get_head(run.pair, u, work.heads_per_group, form) * form.SLICES + u * (form.SLICES - 1)
                fetch_slice(x_desc, run.b, c * BLOCK_M, head_slice, form.SLICES, bar, tiles.x.index(2 * slot + u))
                if z_desc is not None:
                    fetch_slice(z_desc, run.b, c * BLOCK_M, head_slice, form.SLICES, bar, tiles.z.index(2 * slot + u))
            step += 1


@gluon.jit
def add_fetched_pieces(state, start, run, ring, tiles, step, STATE: gl.constexpr, U: gl.constexpr,
                       ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """As `add_pieces`, of pieces that `fetch_tiles` brings; and the step after them."""
    TOGETHER: gl.constexpr = count_together(start.ends_desc.dtype)
    LINES: gl.constexpr = gl.BlockedLayout([1, TOGETHER], [1, 32], [4, 1], [1, 0])  # as `line_layout` has them
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if run.npieces > 0:
        wait_for_last()
    for i in range(2 * run.piece + U, 2 * (run.piece + run.npieces) + U, 2):
        factor = gl.load(start.factors + i)
        scales = load_scales(start.ends, i, STATE, ROWS, WIDTH)
        slot = slot_of(ring, step)
        wait_full(ring, step)
        line = gl.reshape(as_tile((tiles.B if U == 0 else tiles.C).index(slot), start.ends_desc).load(LINES), [ROWS * WIDTH])
        state = state * factor + undo_line_up(line, TOGETHER, STATE).to(gl.float32) * scales
        # so that all loads have been used before the slot is filled again; the place of x in this slot is free
        reinterpret(tiles.x.index(2 * slot + U), [ROWS], LINE, gl.float32).store(gl.max(state, 1))
        fence_async_shared()
        block_barrier()
        mark_empty(ring, slot)
        step += 1
    return state, step


@gluon.jit
def join_columns(a, b, LAYOUT: gl.constexpr):
    """Undoes `split_columns`."""
    ROWS: gl.constexpr = a.shape[0]
    WIDTH: gl.constexpr = a.shape[1]
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH]), LAYOUT)


@gluon.jit
def load_both_parts(start, run, h, bh, work, SLICE: gl.constexpr, EVERY: gl.constexpr, STATE: gl.constexpr, form: gl.constexpr,
                    ROWS: gl.constexpr):
    """`load_start` of a slice [P, 256]."""
    return join_columns(load_start(start, run, h, bh, work, SLICE, 0, EVERY, STATE, form, ROWS, PART),
                        load_start(start, run, h, bh, work, SLICE, 1, EVERY, STATE, form, ROWS, PART), STATE)


@gluon.jit
def write_quarter(outputs, b, c, h, state, tiles, work, form: gl.constexpr, U: gl.constexpr, N: gl.constexpr,
                  EVERY: gl.constexpr, ROWS: gl.constexpr):
    """A quarter of the state of a slice before sub-chunk c leaves, if that state does."""
    if outputs.states is not None:
        if outputs.asked is None:
            if c % EVERY == 0:
                row = b * ((work.nsub + EVERY - 1) // EVERY) + c // EVERY
                store_quarter(outputs.states, row * work.nheads + h, state, tiles, form, U, N, ROWS)
        else:
            if c > 0 and c % outputs.asked == 0:
                row = b * outputs.nasked + c // outputs.asked - 1
                store_quarter(outputs.states, row * work.nheads + h, state, tiles, form, U, N, ROWS)


@gluon.jit
def store_quarter(states_desc, at, state, tiles, form: gl.constexpr, U: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    """It leaves by one of the slice's two tiles, in turn."""
    SLICE: gl.constexpr = U if form.SLICES == 2 else 0
    QUARTER: gl.constexpr = state.shape[1]
    store_wait(1)
    block_barrier()
    get_tile(tiles.states, 2 * U + N % 2, ROWS, QUARTER).store(state.to(states_desc.dtype))
    fence_async_shared()
    block_barrier()
    async_store(states_desc, [at, SLICE * ROWS, N * QUARTER], tiles.states.index(2 * U + N % 2))


@gluon.jit
def multiply_quarter(state, C, N: gl.constexpr, y, OPERAND: gl.constexpr):
    """y^T + S C^T of a quarter of the state. The product is waited for, and its operand is free: there are no registers for
    two.
    """
    QUARTER: gl.constexpr = state.shape[1]
    S = gl.convert_layout(state.to(C.dtype), OPERAND)
    C_t = C.slice(N * QUARTER, QUARTER, dim=1).permute((1, 0))
    y = warpgroup_mma(S, C_t, y, use_acc=N > 0, is_async=True)  # [P, N] @ [N, M]
    return warpgroup_mma_wait(0, deps=(y,))


@gluon.jit
def scan_slice(outputs, rings, tiles, vectors, dA_cumsum, D, start, work, form: gl.constexpr, U: gl.constexpr,
               DEFERRED: gl.constexpr, EVERY: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The consumer warpgroup of slice U of a pair: its state and its output."""
    SLICE: gl.constexpr = U if form.SLICES == 2 else 0
    HEAD: gl.constexpr = U - SLICE  # the lane of `masks`
    HEADS: gl.constexpr = 2 // form.SLICES
    DTYPE: gl.constexpr = tiles.x.dtype
    PI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # y^T
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PI, 2)
    gl.static_assert(not DEFERRED or outputs.states is None, "what is written is S, not R")
    FREED: gl.constexpr = are_freed_with_tiles(rings.tiles.full.shape[0], rings.masks.full.shape[0] // HEADS)
    step, fetched = 0, 0  # fetched: that of the ring of tiles, where pieces are steps too
    if start.ends is None:
        wait_for_last()
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = load_run(work.runs, k)
        b, first, last = run.b, run.first, run.last
        h = get_head(run.pair, U, work.heads_per_group, form)
        bh = (b * work.nheads + h).to(gl.int64)
        state = gl.zeros([ROWS, WIDTH], gl.float32, STATE)
        if first < last:  # loaded in any case, given states would have ptxas run every product by itself (C7512)
            state = load_both_parts(start, run, h, bh, work, SLICE, EVERY, STATE, form, ROWS)
        if start.ends_desc is not None:
            state, fetched = add_fetched_pieces(state, start, run, rings.tiles, tiles, fetched, STATE, U, ROWS, WIDTH)
            block_barrier()  # or Triton would put one into every step of the loop
        else:
            state = add_pieces(state, start.ends, start.factors, run, STATE, U, ROWS, WIDTH)
        A_last = dA_cumsum + bh * work.nsub * BLOCK_M + BLOCK_M - 1
        end = gl.load(A_last + first * BLOCK_M)
        lag = 0.0
        if D is not None:
            D_h = load_D(D, h, SLICE, form, PI, ROWS)
        for c in range(first, last):
            slot, mask = slot_of(rings.tiles, fetched), slot_of(rings.masks, step, HEAD, HEADS)
            x_t = get_tile(tiles.x, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0))
            B, C = get_tile(tiles.B, slot, BLOCK_M, WIDTH), get_tile(tiles.C, slot, BLOCK_M, WIDTH)
            wait_full(rings.tiles, fetched)
            y = gl.zeros([ROWS, BLOCK_M], gl.float32, PI)
            left, right = split_columns(state)
            state0, state1 = split_columns(left)
            state2, state3 = split_columns(right)
            write_quarter(outputs, b, c, h, state0, tiles, work, form, U, 0, EVERY, ROWS)
            y = multiply_quarter(state0, C, 0, y, OPERAND)
            write_quarter(outputs, b, c, h, state1, tiles, work, form, U, 1, EVERY, ROWS)
            y = multiply_quarter(state1, C, 1, y, OPERAND)
            write_quarter(outputs, b, c, h, state2, tiles, work, form, U, 2, EVERY, ROWS)
            y = multiply_quarter(state2, C, 2, y, OPERAND)
            write_quarter(outputs, b, c, h, state3, tiles, work, form, U, 3, EVERY, ROWS)
            y = multiply_quarter(state3, C, 3, y, OPERAND)
            state, lag, is_left = decay_state(state, lag, end, DEFERRED)
            end = gl.load(A_last + gl.minimum(c + 1, last - 1) * BLOCK_M)
            wait_full(rings.masks, step, HEAD, HEADS)
            y = y * gl.expand_dims(vectors.from_start.index(mask).load(gl.SliceLayout(0, PI)), 0)
            w = gl.expand_dims(vectors.to_end.index(mask).load(gl.SliceLayout(0, OPERAND)), 0)
            x_end = weigh(x_t.load(OPERAND), w)
            # both in flight before anything else touches an accumulator: ptxas would insert a wait
            y = warpgroup_mma(x_t, tiles.L.index(mask), y, is_async=True)  # [P, M] @ [M, M]
            state = warpgroup_mma(x_end, B, state, use_acc=is_left, is_async=True)  # [P, M] @ [M, N]
            y = warpgroup_mma_wait(1, deps=(y,))  # y leaves while the state's product runs
            if D is not None:
                y = add_multiple(y, x_t.load(PI), D_h)
            store_wait(0)
            block_barrier()
            if not FREED:
                mark_empty(rings.masks, mask)
            if outputs.y is not None:
                get_tile(tiles.y, 2 + U, BLOCK_M, ROWS).permute((1, 0)).store(y.to(DTYPE))
            if tiles.z is not None:
                y *= make_gate(get_tile(tiles.z, 2 * slot + U, BLOCK_M, ROWS).permute((1, 0)).load(PI))
            get_tile(tiles.y, U, BLOCK_M, ROWS).permute((1, 0)).store(y.to(DTYPE))
            state, x_end = warpgroup_mma_wait(0, deps=(state, x_end))
            fence_async_shared()
            block_barrier()
            # not before y is there: a load from x that is only on its way would find the next tile (docs/log/hopper-scan.md)
            mark_empty(rings.tiles, slot)
            write_slice(outputs.out, b, c * BLOCK_M, h * form.SLICES + SLICE, form.SLICES, tiles.y.index(U))
            if outputs.y is not None:
                write_slice(outputs.y, b, c * BLOCK_M, h * form.SLICES + SLICE, form.SLICES, tiles.y.index(2 + U))
            step += 1
            fetched += 1
        if outputs.asked is not None:  # noqa: SIM102
            if last == work.nsub and last == outputs.asked * outputs.nasked:
                left, right = split_columns(state)
                state0, state1 = split_columns(left)
                state2, state3 = split_columns(right)
                write_quarter(outputs, b, last, h, state0, tiles, work, form, U, 0, EVERY, ROWS)
                write_quarter(outputs, b, last, h, state1, tiles, work, form, U, 1, EVERY, ROWS)
                write_quarter(outputs, b, last, h, state2, tiles, work, form, U, 2, EVERY, ROWS)
                write_quarter(outputs, b, last, h, state3, tiles, work, form, U, 3, EVERY, ROWS)
        if outputs.final_states is not None and last == work.nsub:
            at = locate_state(outputs.final_states, bh, STATE, SLICE, 0, form, ROWS, WIDTH)
            store_masked(at, apply_decay(state, lag, DEFERRED), state_mask(STATE, SLICE, 0, form, ROWS, WIDTH))
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_wide_scan_kernel(x_desc, B_desc, C_desc, z_desc, out_desc, y_desc, states_desc, ends_desc, dA_cumsum, dt, D,
                            initial_states, ends, factors, final_states, starts, runs, nruns, nsub, nheads, heads_per_group,
                            asked, nasked, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, ODD: gl.constexpr, D_ROWS: gl.constexpr,
                            STAGES: gl.constexpr, SLOTS: gl.constexpr, EVERY: gl.constexpr):
    DTYPE: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[-1]
    WIDTH: gl.constexpr = B_desc.block_shape[-1]
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, PART, ODD, D_ROWS)
    HEADS: gl.constexpr = 2 // FORM.SLICES
    DEFERRED: gl.constexpr = defers_decay(DTYPE, states_desc)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    Xs = allocate_tiles(x_desc, 2 * STAGES)
    Bs = allocate_tiles(B_desc, STAGES)
    Cs = allocate_tiles(C_desc, STAGES)
    Ls = gl.allocate_shared_memory(DTYPE, [HEADS * SLOTS, BLOCK_M, BLOCK_M], SQUARE)
    Ys = allocate_tiles(out_desc, 2 if y_desc is None else 4)
    Zs = allocate_tiles(z_desc, 2 * STAGES)
    Ss = allocate_tiles(states_desc, 4)
    vectors = allocate_vectors(HEADS * SLOTS, HEADS, BLOCK_M)
    rings = Rings(make_ring(STAGES, 3), make_ring(HEADS * SLOTS, FORM.SLICES))
    fence_async_shared()
    tiles = Tiles(Xs, Bs, Cs, Zs, Ls, Ys, Ss)
    work = Work(runs, nruns, nsub, nheads, heads_per_group, Documents(None, None, None, None, None))
    start = Start(initial_states, ends, factors, starts, ends_desc)
    outputs = Outputs(out_desc, y_desc, states_desc, final_states, None, None, asked, nasked)
    gl.warp_specialize([
        (scan_slice, (outputs, rings, tiles, vectors, dA_cumsum, D, start, work, FORM, 0, DEFERRED, EVERY, BLOCK_M, ROWS,
                      WIDTH)),
        (scan_slice, (outputs, rings, tiles, vectors, dA_cumsum, D, start, work, FORM, 1, DEFERRED, EVERY, BLOCK_M, ROWS,
                      WIDTH)),
        (make_masks, (rings, tiles, vectors, dA_cumsum, dt, start, work, FORM, DEFERRED, BLOCK_M, WIDTH)),
        (fetch_tiles, (x_desc, B_desc, C_desc, z_desc, ends_desc, rings.tiles, tiles, work, FORM)),
    ], [4, 4, 1], [208, 72, 24])


def hopper_wide_scan(i: SSDInputs, x_desc, B_desc, C_desc, out_desc, dt, dA_cumsum, runs: torch.Tensor, initial_states=None,
                     ends=None, factors=None, final_states=None, states_desc=None, starts=None, every: int = SUB_CHUNK,
                     z_desc=None, y_desc=None, nasked: int | None = None, ends_desc=None) -> None:
    """As `scan.hopper_scan`, in one launch. ends_desc: of ends, where tiles can hold them."""
    heads_per_group = i.nheads // i.ngroups
    asked = None if nasked is None else i.return_states_every // dt.shape[3]
    slots = choose_slots(_SLOTS, i, B_desc.block_shape[-1], 0 if z_desc is None else z_desc.base.itemsize, y_desc is not None,
                         0 if states_desc is None else 2 * QUARTER, starts)
    launch(
        hopper_wide_scan_kernel, runs.shape[0], x_desc, B_desc, C_desc, z_desc, out_desc, y_desc, states_desc, ends_desc,
        dA_cumsum, dt, i.D, initial_states, ends, factors, final_states, starts, runs, runs.shape[1], dt.shape[2], i.nheads,
        heads_per_group, asked, nasked, HEADDIM=i.headdim, DSTATE=i.dstate, ODD=heads_per_group % 2 == 1,
        D_ROWS=i.has_D_of_channels, STAGES=slots.tiles, SLOTS=slots.masks, EVERY=every // dt.shape[3],
        num_warps=4, maxnreg=_REGISTERS, launch_pdl=may_begin_early(ends, starts is None, initial_states))
