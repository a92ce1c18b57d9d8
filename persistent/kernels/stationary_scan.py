"""stationary_scan, equations (26) to (28) and (5): chunk_state, state_passing, bmm_chunk and chunk_scan in one.

A program takes a whole segment of a sequence block by block; its state is never in memory. `fused.kernels.segment` has the
formulas.

Reads x, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; CB (batch, blocks, ngroups,
BLOCK_M, BLOCK_M) or None; D (nheads,) or (nheads, headdim); dt, dA_cumsum (batch, nheads, blocks, BLOCK_M) fp32;
initial_states (batch, nheads, headdim, dstate), any strides; and, where sequences are cut, `ends` (batch, pieces, nheads,
headdim, dstate) and `factors` (batch, pieces, nheads), both fp32, of the pieces of all segments but the last, as
chunk_state_passing writes them: the program of segment s first combines, in their order, the pieces before it.

Writes out (batch, seqlen, nheads, headdim) in the dtype of x; y, the output before the gate, where it is kept; final_states
(batch, nheads, headdim, dstate) fp32; and, unless None, prev_states (batch, nchunks, nheads, headdim, dstate), the state before
each chunk.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused.kernels import bmm_chunk_scan
from fused.kernels.segment import Tokens, get_form, load_initial, scan_segment
from fused.schedule import Schedule
from ssd.kernels.arguments import COUNTS, Strides, allocate_outputs, cdiv, strides
from ssd.kernels.device import state_tile_t, unpack_program
from ssd.runtime.launch import launch
from ssd.types import Options, SSDInputs

CONFIGS = replace(bmm_chunk_scan.CONFIGS, kernel="stationary_scan")  # of the same segments


class Cut(NamedTuple):
    """How sequences are cut: segments of a sequence, tokens of a segment, pieces of a segment."""

    nsegments: int
    segment: int
    pieces: int


@triton.jit
def state_before(s, pieces, ends, factors, b, h, state, at, inside, nsegments, NHEADS: tl.constexpr, SIZE: tl.constexpr):
    """(28): the state that enters segment s, from the one that enters the sequence; [N, P] fp32."""
    for piece in range(0, s * pieces):
        slot = (b * (nsegments - 1) * pieces + piece) * NHEADS + h
        state = state * tl.load(factors + slot) + tl.load(ends + slot * SIZE + at, mask=inside, other=0.0)
    return state


@triton.jit(do_not_specialize=COUNTS)
def stationary_scan_kernel(x, z, B, C, CB, D, dt, dA_cumsum, seq_idx, initial_states, ends, factors, prev_states, out, y,
                           final_states, strides, initial_strides, seqlen, nchunks, cut, FORM: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    tile, h, s, b = unpack_program((FORM.headdim + BLOCK_P - 1) // BLOCK_P, FORM.nheads, cut.nsegments)
    offs_n, offs_p = tl.arange(0, BLOCK_N), tile * BLOCK_P + tl.arange(0, BLOCK_P)
    at, inside = state_tile_t(offs_p, offs_n, FORM)
    state = load_initial(initial_states, initial_strides, b, h, offs_n, offs_p, FORM)
    if ends is not None:
        state = state_before(s, cut.pieces, ends, factors, b, h, state, at, inside, cut.nsegments, FORM.nheads,
                             FORM.headdim * FORM.dstate)
    first = s.to(tl.int32) * cut.segment
    end = tl.minimum(first + cut.segment, seqlen)
    tokens = Tokens(x, z, B, C, D, CB, dt, dA_cumsum, seq_idx)
    state = scan_segment(state, first, end, b, h, offs_n, offs_p, tokens, prev_states, out, y, strides, seqlen, nchunks,
                         FORM, BLOCK_M)
    tl.store(final_states + (b * FORM.nheads + h) * FORM.headdim * FORM.dstate + at, state, mask=inside & (end == seqlen))


def stationary_scan(i: SSDInputs, CB: Tensor | None, dt: Tensor, dA_cumsum: Tensor, ends: Tensor | None, factors: Tensor | None,
                    schedule: Schedule, options: Options, save: bool,
                    keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns out, y, final_states and prev_states, in i.states_dtype.

    y is None unless it is kept (`SSDInputs.keeps_y`), prev_states is None unless they are wanted (`keep`). ends and
    factors are None where the schedule has one segment.
    """
    out, y = allocate_outputs(i, save)
    final_states = torch.empty(i.batch, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    prev_states = None
    if keep:
        prev_states = final_states.new_empty(i.batch, i.nchunks, *final_states.shape[1:], dtype=i.states_dtype)
    config = CONFIGS.pick(i)
    launch(
        stationary_scan_kernel, cdiv(i.headdim, config["BLOCK_P"]) * i.nheads * schedule.nsegments * i.batch,
        i.x, i.z, i.B, i.C, CB, i.D, dt, dA_cumsum, i.seq_idx, i.initial_states, ends, factors, prev_states, out, y,
        final_states, Strides(x=i.x.stride(), z=strides(i.z), B=i.B.stride(), C=i.C.stride(), D=strides(i.D)),
        strides(i.initial_states), i.seqlen, i.nchunks, Cut(schedule.nsegments, schedule.segment, schedule.pieces),
        get_form(i, options), **config.launch)
    return out, y, final_states, prev_states
