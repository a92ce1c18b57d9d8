"""hopper_pieces: what each piece of a sequence adds to the state, and its decay, in Gluon, for Hopper: the state pass.

Equation (27) of docs/ssd.md over a whole piece, at whose end A is A_end. Roles:

    sum_slice (1 warpgroup a slice): S += (x dt_j exp(A_end - A_j))^T B
    fetch_tiles (1 warp):            B and x of both slices by TMA

In bf16 a run's steps are taken from the last to the first, so that the decay after each is known and S is only ever added to:
nothing is scaled on the chain from one product to the next. In fp16 what has decayed that far would be lost, so S is walked as
hopper_states does. `walks` says what one block walks. A run writes ends (npieces, 2, 64 (width + 1)), the state at its end
where that before it is zero, of tiles so wide, and factors (npieces, 2) fp32, the decay over it, in row `piece`: equation (28)
joins them. With documents a piece begins where the last one that it enters does, and adds that one's own state at its end.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ssd.runtime.gluon_names import block_barrier
from ssd.runtime.launch import launch
from ssd.types import SSDInputs

from .document_states import Entries, allocate_entry
from .documents import TOKEN, Documents, is_run, load_field
from .early import let_next_begin, wait_for_last
from .ring import make_ring, mark_empty, slot_of
from .roles import LOG2E, allocate_tiles, decay, get_head, load_steps, make_form, split_pair
from .start import store_end
from .walks import (
    SIZES,
    Work,
    add_step,
    count_stages,
    fetch_tiles,
    get_batch_row,
    get_step,
    get_sub_chunk,
    get_walk,
    load_document,
    take_entering_state,
)
from .weights import pack_weights

_REGISTERS = 160  # as hopper_states


class Tiles(NamedTuple):
    """Shared memory: x and B by slot of the ring; the weights of each head's tokens."""

    x: gl.shared_memory_descriptor  # [2 STAGES, 1, 64 or 128, 64]: both slices of a slot in a row
    B: gl.shared_memory_descriptor  # [STAGES, 1, 64 or 128, dstate]
    weights: gl.shared_memory_descriptor  # [4, 64 or 128] fp32, packed (`weights`): of two steps in turn


@gluon.jit
def sum_slice(ring, entries, tiles, dA_cumsum, dt, ends, factors, work, form: gl.constexpr, U: gl.constexpr,
              LAST_FIRST: gl.constexpr, BACKWARDS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
              WIDTH: gl.constexpr):
    """The consumer warpgroup of slice U of a pair: S += (x dt_j exp(A_end - A_j))^T B."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    step, entry = 0, 0
    wait_for_last()
    if U == 0:
        let_next_begin()
    for k in range(gl.program_id(0) * work.nruns, gl.program_id(0) * work.nruns + work.nruns):
        run = get_walk(work, k, True, BACKWARDS)
        b, first, last = run.b, run.first, run.last
        final = gl.where(last > first, last - 1, first)
        pair, _ = split_pair(run.pair, form)
        h = get_head(pair, U, work.heads_per_group, form)
        row = (get_batch_row(b, work, BACKWARDS) * work.nheads + h).to(gl.int64) * work.nsub * BLOCK_M
        state = gl.zeros([ROWS, WIDTH], gl.float32, STATE)
        walked = 0.0  # the log of the decay over the steps that have been taken
        if work.documents.blocks is not None:
            entered = load_document(get_sub_chunk(first, b, work, BACKWARDS), b, work, True, BACKWARDS)
        at = get_sub_chunk(final if LAST_FIRST else first, b, work, BACKWARDS)
        a, dt_c, end = load_steps(dA_cumsum, dt, row + at * BLOCK_M, m, BLOCK_M)
        for n in range(first, last):
            slot, line = slot_of(ring, step), 2 * U + step % 2
            after = walked if LAST_FIRST else 0.0
            w = dt_c * decay((after + (end - a)) * LOG2E)
            if BACKWARDS:
                w = gl.where(b >= work.forwards, decay((after + a) * LOG2E), w)
            tiles.weights.index(line).store(pack_weights(w, tiles.x.dtype))
            walked += end
            factor = None if LAST_FIRST else decay(end * LOG2E)
            ahead = get_step(gl.minimum(n + 1, final), run, LAST_FIRST)
            at = get_sub_chunk(ahead, b, work, BACKWARDS)
            a, dt_c, end = load_steps(dA_cumsum, dt, row + at * BLOCK_M, m, BLOCK_M)
            state = add_step(state, factor, ring, tiles, step, slot, line, STATE, U, BLOCK_M, ROWS, WIDTH)
            step += 1
        is_one = is_run(work, k, run)
        if work.documents.blocks is not None:
            entered = gl.where(first < last, entered, -1)
            if entered >= 0:
                state += decay(walked * LOG2E) * take_entering_state(b, entries, entry, work, BACKWARDS, STATE, U, ROWS, WIDTH)
                walked = -1e30  # what came before is not in it
        if is_one:
            piece = run.piece * 2 + U
            store_end(ends, piece, state, STATE, ROWS, WIDTH)
            gl.store(factors + piece, decay(walked * LOG2E))
        if work.documents.blocks is not None:  # noqa: SIM102
            if entered >= 0:  # not before the store, which is the first to use that state
                block_barrier()
                mark_empty(entries.ring, 0)
                entry += 1


@gluon.jit(do_not_specialize=SIZES)
def hopper_pieces_kernel(x_desc, B_desc, dy_desc, C_desc, dA_cumsum, dt, initial_states, dfinal_states, ends, factors, runs,
                         nruns, forwards, nsub, nheads, heads_per_group, blocks, HEADDIM: gl.constexpr, DSTATE: gl.constexpr,
                         ODD: gl.constexpr, STAGES: gl.constexpr):
    BACKWARDS: gl.constexpr = dy_desc is not None
    LAST_FIRST: gl.constexpr = x_desc.dtype == gl.bfloat16
    BLOCK_M: gl.constexpr = x_desc.block_shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[-1]
    WIDTH: gl.constexpr = B_desc.block_shape[-1]
    FORM: gl.constexpr = make_form(HEADDIM, DSTATE, ROWS, WIDTH, ODD)
    Xs = allocate_tiles(x_desc, 2 * STAGES)
    Bs = allocate_tiles(B_desc, STAGES)
    weights = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = make_ring(STAGES, 2)
    entries = Entries(None, None)
    documents = Documents(None, None, None, None, None)
    if blocks is not None:
        Es = allocate_entry(ROWS, WIDTH)
        entries = Entries(Es, make_ring(1, 2))
        documents = Documents(blocks, load_field(blocks, nsub, TOKEN), initial_states, dfinal_states, None)
    fence_async_shared()
    tiles, work = Tiles(Xs, Bs, weights), Work(runs, nruns, forwards, nsub, nheads, heads_per_group, documents)
    gl.warp_specialize([
        (sum_slice, (ring, entries, tiles, dA_cumsum, dt, ends, factors, work, FORM, 0, LAST_FIRST, BACKWARDS, BLOCK_M, ROWS,
                     WIDTH)),
        (sum_slice, (ring, entries, tiles, dA_cumsum, dt, ends, factors, work, FORM, 1, LAST_FIRST, BACKWARDS, BLOCK_M, ROWS,
                     WIDTH)),
        (fetch_tiles, (x_desc, B_desc, dy_desc, C_desc, ring, entries, tiles, work, FORM, True, LAST_FIRST, BACKWARDS)),
    ], [4, 1], [152 if WIDTH <= 128 else 224, 24 if blocks is None else 40])


def hopper_pieces(i: SSDInputs, descriptors, dt, dA_cumsum, npieces: int, runs, forwards: int, blocks=None,
                  starts=(None, None), dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ends, of this dtype, and factors. descriptors: of x, B, and of dy, C if rows from `forwards` on are walked
    backwards.

    runs: (blocks, nruns, 6) int32. blocks: those of documents, in place of sub-chunks; starts: descriptors of their
    initial_states and dfinal_states, each or None for zeros.
    """
    rows, width = (d.block_shape[-1] for d in descriptors[:2])
    ends = torch.empty(npieces, 2, rows * (width + 1), device=i.x.device, dtype=dtype)
    factors = torch.empty(npieces, 2, device=i.x.device, dtype=torch.float32)
    launch(hopper_pieces_kernel, runs.shape[0], *(*descriptors, None, None)[:4], dA_cumsum, dt, *starts, ends, factors, runs,
           runs.shape[1], forwards, dt.shape[2], i.nheads, i.nheads // i.ngroups, blocks, HEADDIM=i.headdim, DSTATE=i.dstate,
           ODD=i.nheads // i.ngroups % 2 == 1, STAGES=count_stages(dt), num_warps=4, maxnreg=_REGISTERS,
           launch_pdl=blocks is None)  # else the producer reads states that may have been copied behind chunk_cumsum
    return ends, factors
