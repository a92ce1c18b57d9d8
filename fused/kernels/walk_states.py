"""walk_states, equation (27): the states of a sequence without its outputs, one kernel for chunk_state and state_passing.

Reads x (batch, seqlen, nheads, headdim), B (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum fp32 as chunk_cumsum
writes them for chunks of any length; starts (batch, nheads, headdim, dstate, nruns), any strides, the state before each run, or
None for zeros. Every sequence is cut into runs of `run` tokens, each walked by its own program for each tile of the state.
Writes, each unless it is None: prev_states (batch, nchunks, nheads, headdim, dstate), the state before each chunk; ends (batch,
nruns, nheads, headdim, dstate) fp32, the state after each run; and factors (batch, nruns, nheads) fp32, by which the state
before a run enters the one after it. Without ends, a run is walked to the chunk it ends with, and not through it.
"""

import torch
import triton
import triton.language as tl

from ssd.kernels.arguments import cdiv, strides
from ssd.kernels.device import unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .walk import load_initial, state_tile, store_prev_state, walk_state

CONFIGS = ConfigSpace(
    "walk_states",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((32, 128, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4),
             (32, 128, 64, 4, 2), (64, 128, 32, 4, 4)),
    staged=(("BLOCK_K", "BLOCK_P"), ("BLOCK_K", "BLOCK_N")),
    unstaged=(("BLOCK_K", "BLOCK_P"),),
)


@triton.jit
def walk_states_kernel(x, x_strides, B, B_strides, dt, dA_cumsum, seq_idx, starts, starts_strides, prev_states, ends,
                       factors, seqlen, nchunks, run, nruns, NHEADS: tl.constexpr, NGROUPS: tl.constexpr,
                       HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, CUMSUM: tl.constexpr,
                       EXP2: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    tile, h, r, b = unpack_program((HEADDIM + BLOCK_P - 1) // BLOCK_P * NTILES_N, NHEADS, nruns)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    first = r.to(tl.int32) * run
    end = tl.minimum(first + run, seqlen)
    if ends is None:
        end = (end - 1) // CHUNK * CHUNK
    if starts is not None:
        starts += r * starts_strides[4]
    state = load_initial(starts, starts_strides, b, h, offs_n, offs_p, HEADDIM, DSTATE)
    state, factor = walk_state(state, first, end, b, h, offs_n, offs_p, x, x_strides, B, B_strides, dt, dA_cumsum,
                               seq_idx, prev_states, seqlen, nchunks, NHEADS, NGROUPS, HEADDIM, DSTATE, CHUNK, CUMSUM, EXP2,
                               PRECISION, BLOCK_K)
    slot = (b * nruns + r) * NHEADS + h
    if ends is None:
        store_prev_state(prev_states + (b * nchunks * NHEADS + h) * HEADDIM * DSTATE, state, end, offs_n, offs_p, NHEADS,
                         HEADDIM, DSTATE, CHUNK)
    else:
        at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
        tl.store(ends + slot * HEADDIM * DSTATE + at, state, mask=inside)
    if factors is not None:
        tl.store(factors + slot, factor)


def chunk_states(i: SSDInputs, dt, dA_cumsum, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states (batch, nheads, headdim, dstate) fp32."""
    prev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=i.states_dtype)
    final_states = torch.empty(i.batch, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    starts = None if i.initial_states is None else i.initial_states[..., None]
    _launch(i, dt, dA_cumsum, starts, prev_states, final_states, None, i.seqlen, 1, options)
    return prev_states, final_states


def chunk_states_between(i: SSDInputs, dt, dA_cumsum, known: torch.Tensor, run: int, options: Options) -> torch.Tensor:
    """Returns prev_states as `chunk_states` does, from those known for longer chunks, of `run` tokens, all walked at once."""
    prev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=i.states_dtype)
    _launch(i, dt, dA_cumsum, known.movedim(1, -1), prev_states, None, None, run, known.shape[1], options)
    return prev_states


def run_states(i: SSDInputs, dt, dA_cumsum, run: int, nruns: int, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ends and factors of the first `nruns` runs of `run` tokens, each from a state of zeros."""
    ends = torch.empty(i.batch, nruns, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    factors = torch.empty(i.batch, nruns, i.nheads, device=i.x.device, dtype=torch.float32)
    _launch(i, dt, dA_cumsum, None, None, ends, factors, run, nruns, options)
    return ends, factors


def _launch(i: SSDInputs, dt, dA_cumsum, starts, prev_states, ends, factors, run: int, nruns: int, options: Options):
    cumsum = dA_cumsum.shape[-1]
    config = CONFIGS.pick(i)
    tiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        walk_states_kernel, tiles * i.nheads * nruns * i.batch,
        i.x, i.x.stride(), i.B, i.B.stride(), dt, dA_cumsum, i.seq_idx, starts, strides(starts), prev_states, ends,
        factors, i.seqlen, i.nchunks, run, nruns, i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size, cumsum, options.exp2,
        options.precision, **config.launch | {"BLOCK_K": min(config["BLOCK_K"], cumsum)})
