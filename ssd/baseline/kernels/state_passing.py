"""state_passing, equation (8): the recurrence over chunks.

    H_{c+1} = m(prev, last) exp(A_last) H_c + S_c

Reads states, S, (batch, nchunks, nheads, headdim, dstate) fp32, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32 and
initial_states (batch, nheads, headdim, dstate), any strides. Writes prev_states, H, the state before each chunk, shaped
as states, in the dtype asked for, and final_states (batch, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, get_sizes, strides
from ...kernels.device import decay, document_before, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import SSDInputs

CONFIGS = ConfigSpace(
    "state_passing",
    axes={"BLOCK": None},
    entries=((1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5), (128, 1, 8)),
)


@triton.jit
def carried_decay(dA_cumsum, seq_idx, c, seqlen, CHUNK: tl.constexpr):
    """m(prev, last) exp(A_last) of chunk c. dA_cumsum points at the first chunk of its head, seq_idx at the row."""
    factor = decay(tl.load(dA_cumsum + c * CHUNK + CHUNK - 1))
    if seq_idx is not None:
        last = tl.load(seq_idx + tl.minimum((c + 1) * CHUNK, seqlen) - 1)
        factor = tl.where(document_before(seq_idx, c * CHUNK) == last, factor, 0.0)
    return factor


@triton.jit
def offsets_any_strides(strides, b, h, offs, DSTATE: tl.constexpr):
    """Offsets of the elements `offs` of one state, counted as if (headdim, dstate) were contiguous."""
    wide = offs.to(tl.int64)
    return b * strides[0] + h * strides[1] + wide // DSTATE * strides[2] + wide % DSTATE * strides[3]


@triton.jit(do_not_specialize=COUNTS)
def state_passing_kernel(states, dA_cumsum, initial_states, seq_idx, prev_states, final_states, initial_strides, seqlen,
                         nchunks, SIZES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    SIZE: tl.constexpr = SIZES.headdim * SIZES.dstate
    tile, h, _, b = unpack_program((SIZE + BLOCK - 1) // BLOCK, SIZES.nheads, 1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    state = tl.zeros([BLOCK], tl.float32)
    if initial_states is not None:
        at_any = offsets_any_strides(initial_strides, b, h, offs, SIZES.dstate)
        state = tl.load(initial_states + at_any, mask=inside, other=0.0).to(tl.float32)
    dA_cumsum += (b * SIZES.nheads + h) * nchunks * SIZES.chunk
    if seq_idx is not None:
        seq_idx += b * seqlen
    at = (b * nchunks * SIZES.nheads + h) * SIZE + offs
    for c in tl.range(0, nchunks, num_stages=STAGES):
        tl.store(prev_states + at, state.to(prev_states.dtype.element_ty), mask=inside)
        factor = carried_decay(dA_cumsum, seq_idx, c, seqlen, SIZES.chunk)
        state = factor * state + tl.load(states + at, mask=inside, other=0.0)
        at += SIZES.nheads * SIZE
    tl.store(final_states + (b * SIZES.nheads + h) * SIZE + offs, state, mask=inside)


def state_passing(i: SSDInputs, states: Tensor, dA_cumsum: Tensor) -> tuple[Tensor, Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states, fp32."""
    prev_states = torch.empty_like(states, dtype=i.states_dtype)
    final_states = torch.empty(i.batch, *states.shape[2:], device=states.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    launch(
        state_passing_kernel, cdiv(i.headdim * i.dstate, config["BLOCK"]) * i.nheads * i.batch,
        states, dA_cumsum, i.initial_states, i.seq_idx, prev_states, final_states, strides(i.initial_states), i.seqlen,
        i.nchunks, get_sizes(i), config["BLOCK"], config.num_stages, num_warps=config.num_warps)
    return prev_states, final_states
