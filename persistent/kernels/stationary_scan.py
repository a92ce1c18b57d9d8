"""stationary_scan, equations (26) to (28) and (5): a block walks a whole segment of a sequence, its state never in memory.

Reads what `walk` names; initial_states (batch, nheads, headdim, dstate), any strides; and, where sequences are cut, `ends` and
`factors` of the pieces of all segments but the last, as walk_states writes them: the block of segment s first combines, in
their order, the pieces before it. Writes out (batch, seqlen, nheads, headdim) in the dtype of x; with z, y, the output before
the gate; final_states (batch, nheads, headdim, dstate) fp32; and, unless None, prev_states (batch, nchunks, nheads, headdim,
dstate), the state before each chunk.
"""

import torch
import triton
import triton.language as tl

from fused.kernels.walk import load_initial, state_tile, walk
from fused.schedule import Schedule
from ssd.kernels.arguments import cdiv, strides
from ssd.kernels.device import unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "stationary_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_N", "BLOCK_P"), ("BLOCK_M", "BLOCK_M"), ("BLOCK_M", "BLOCK_P")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def state_before(s, pieces, ends, factors, b, h, state, at, inside, nsegments, NHEADS: tl.constexpr, SIZE: tl.constexpr):
    """(28): the state that enters segment s, from the one that enters the sequence; [N, P] fp32."""
    for piece in range(0, s * pieces):
        slot = (b * (nsegments - 1) * pieces + piece) * NHEADS + h
        state = state * tl.load(factors + slot) + tl.load(ends + slot * SIZE + at, mask=inside, other=0.0)
    return state


@triton.jit
def stationary_scan_kernel(x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt, dA_cumsum, seq_idx,
                           initial_states, initial_strides, ends, factors, prev_states, out, y, final_states, seqlen, nchunks,
                           nsegments, segment, pieces, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr,
                           DSTATE: tl.constexpr, CHUNK: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    tile, h, s, b = unpack_program((HEADDIM + BLOCK_P - 1) // BLOCK_P, NHEADS, nsegments)
    offs_n, offs_p = tl.arange(0, BLOCK_N), tile * BLOCK_P + tl.arange(0, BLOCK_P)
    at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
    state = load_initial(initial_states, initial_strides, b, h, offs_n, offs_p, HEADDIM, DSTATE)
    if ends is not None:
        state = state_before(s, pieces, ends, factors, b, h, state, at, inside, nsegments, NHEADS, HEADDIM * DSTATE)
    first = s.to(tl.int32) * segment
    end = tl.minimum(first + segment, seqlen)
    state = walk(state, first, end, b, h, offs_n, offs_p, x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D,
                 D_strides, dt, dA_cumsum, seq_idx, prev_states, out, y, seqlen, nchunks, NHEADS, NGROUPS, HEADDIM, DSTATE,
                 CHUNK, EXP2, PRECISION, BLOCK_M)
    tl.store(final_states + (b * NHEADS + h) * HEADDIM * DSTATE + at, state, mask=inside & (end == seqlen))


def stationary_scan(i: SSDInputs, CB, dt, dA_cumsum, ends, factors, schedule: Schedule, options: Options, save: bool,
                    keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Returns out, y, final_states and prev_states, in i.states_dtype.

    y is None without z or unless a backward may follow (`save`), prev_states is None unless they are wanted (`keep`). ends and
    factors are None where the schedule has one segment.
    """
    out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    y = torch.empty_like(out) if save and i.z is not None else None
    final_states = torch.empty(i.batch, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    prev_states = None
    if keep:
        prev_states = final_states.new_empty(i.batch, i.nchunks, *final_states.shape[1:], dtype=i.states_dtype)
    config = CONFIGS.pick(i)
    launch(
        stationary_scan_kernel, cdiv(i.headdim, config["BLOCK_P"]) * i.nheads * schedule.nsegments * i.batch,
        i.x, i.x.stride(), i.z, strides(i.z), i.B, i.B.stride(), i.C, i.C.stride(), CB, i.D, strides(i.D), dt,
        dA_cumsum, i.seq_idx, i.initial_states, strides(i.initial_states), ends, factors, prev_states, out, y, final_states,
        i.seqlen, i.nchunks, schedule.nsegments, schedule.segment, schedule.pieces, i.nheads, i.ngroups, i.headdim, i.dstate,
        i.chunk_size, options.exp2, options.precision, **config.launch)
    return out, y, final_states, prev_states
