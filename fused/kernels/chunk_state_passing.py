"""chunk_state_passing, equation (27): the states of a sequence without its outputs, chunk_state and state_passing in one.

    H <- m(prev, last) exp(A_last) H + sum_j m(j, last) exp(A_last - A_j) dt_j B_j^T x_j

Every sequence is cut into segments of `segment` tokens, each taken block by block by its own program for each tile of the
state.

Reads x (batch, seqlen, nheads, headdim), B (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum, A, fp32, as
chunk_cumsum writes them for chunks of any length; starts (batch, nheads, headdim, dstate, nsegments), any strides, the
state before each segment, or None for zeros. Writes, each unless it is None: prev_states (batch, nchunks, nheads, headdim,
dstate), the state before each chunk; ends (batch, nsegments, nheads, headdim, dstate) fp32, the state after each segment; and
factors (batch, nsegments, nheads) fp32, by which the state before a segment enters the one after it. Without ends, a segment is
taken up to the chunk it ends with, and not through it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides, cdiv, strides
from ssd.kernels.device import state_tile_t, unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .segment import add_to_state, block_decays, get_form, load_block, load_initial, store_prev_state

CONFIGS = ConfigSpace(
    "chunk_state_passing",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((32, 128, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4),
             (32, 128, 64, 4, 2), (64, 128, 32, 4, 4)),
    staged=(("BLOCK_K", "BLOCK_P"), ("BLOCK_K", "BLOCK_N")),
    unstaged=(("BLOCK_K", "BLOCK_P"),),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_state_passing_kernel(x, B, dt, dA_cumsum, seq_idx, starts, prev_states, ends, factors, strides, starts_strides,
                               seqlen, nchunks, segment, nsegments, FORM: tl.constexpr, CUMSUM: tl.constexpr,
                               BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = (FORM.dstate + BLOCK_N - 1) // BLOCK_N
    tile, h, s, b = unpack_program((FORM.headdim + BLOCK_P - 1) // BLOCK_P * NTILES_N, FORM.nheads, nsegments)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    first = s.to(tl.int32) * segment
    end = tl.minimum(first + segment, seqlen)
    if ends is None:
        end = (end - 1) // FORM.chunk * FORM.chunk
    if starts is not None:
        starts += s * starts_strides[4]
    state = load_initial(starts, starts_strides, b, h, offs_n, offs_p, FORM)

    padded = tl.cast(tl.cdiv(seqlen, CUMSUM), tl.int64) * CUMSUM
    x += b * strides.x[0] + h * strides.x[2]
    B += b * strides.B[0] + h // (FORM.nheads // FORM.ngroups) * strides.B[2]
    dt += (b * FORM.nheads + h) * padded
    dA_cumsum += (b * FORM.nheads + h) * padded
    if seq_idx is not None:
        seq_idx += b * seqlen
    if prev_states is not None:
        prev_states += (b * nchunks * FORM.nheads + h) * FORM.headdim * FORM.dstate
    offs_m = tl.arange(0, BLOCK_K)
    factor = 1.0
    for token in tl.range(first, end, BLOCK_K):
        if prev_states is not None:
            store_prev_state(prev_states, state, token, offs_n, offs_p, FORM)
        x_j = load_block(x, strides.x, token, offs_m, offs_p, seqlen, FORM.headdim)
        B_j = load_block(B, strides.B, token, offs_m, offs_n, seqlen, FORM.dstate)
        _, _, to_end, carried = block_decays(dA_cumsum, seq_idx, token, offs_m, seqlen, CUMSUM, FORM)
        state = add_to_state(state, x_j, B_j, to_end * tl.load(dt + token + offs_m), carried, FORM)
        factor *= carried

    slot = (b * nsegments + s) * FORM.nheads + h
    if ends is None:
        store_prev_state(prev_states, state, end, offs_n, offs_p, FORM)
    else:
        at, inside = state_tile_t(offs_p, offs_n, FORM)
        tl.store(ends + slot * FORM.headdim * FORM.dstate + at, state, mask=inside)
    if factors is not None:
        tl.store(factors + slot, factor)


def chunk_state_passing(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states (batch, nheads, headdim, dstate) fp32."""
    prev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=i.states_dtype)
    final_states = torch.empty(i.batch, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    starts = None if i.initial_states is None else i.initial_states[..., None]
    _launch(i, dt, dA_cumsum, starts, prev_states, final_states, None, i.seqlen, 1, options)
    return prev_states, final_states


def refine_states(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, known: Tensor, segment: int, options: Options) -> Tensor:
    """Returns prev_states as `chunk_state_passing` does, from those known at the start of each segment, all taken at once."""
    prev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=i.states_dtype)
    _launch(i, dt, dA_cumsum, known.movedim(1, -1), prev_states, None, None, segment, known.shape[1], options)
    return prev_states


def segment_states(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, segment: int, nsegments: int,
                   options: Options) -> tuple[Tensor, Tensor]:
    """Returns ends and factors of the first `nsegments` segments of `segment` tokens, each from a state of zeros."""
    ends = torch.empty(i.batch, nsegments, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    factors = torch.empty(i.batch, nsegments, i.nheads, device=i.x.device, dtype=torch.float32)
    _launch(i, dt, dA_cumsum, None, None, ends, factors, segment, nsegments, options)
    return ends, factors


def _launch(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, starts: Tensor | None, prev_states: Tensor | None, ends: Tensor | None,
            factors: Tensor | None, segment: int, nsegments: int, options: Options) -> None:
    cumsum = dA_cumsum.shape[-1]
    config = CONFIGS.pick(i)
    tiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        chunk_state_passing_kernel, tiles * i.nheads * nsegments * i.batch,
        i.x, i.B, dt, dA_cumsum, i.seq_idx, starts, prev_states, ends, factors, Strides(x=i.x.stride(), B=i.B.stride()),
        strides(starts), i.seqlen, i.nchunks, segment, nsegments, get_form(i, options), cumsum,
        **config.launch | {"BLOCK_K": min(config["BLOCK_K"], cumsum)})
