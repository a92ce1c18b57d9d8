"""state_passing, equation (8): the recurrence over chunks.

Reads states (batch, nchunks, nheads, headdim, dstate) fp32, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32 and
initial_states (batch, nheads, headdim, dstate), any strides. Writes prev_states, the state before each chunk, shaped
as states, in the dtype asked for, and final_states (batch, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl

from ...kernels.arguments import cdiv
from ...kernels.device import decay, document_at_end, document_before, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import SSDInputs

CONFIGS = ConfigSpace(
    "state_passing",
    axes={"BLOCK": None},
    entries=((1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5), (128, 1, 8)),
)


@triton.jit
def carried_decay(dA_cumsum, seq_idx, b, c, seqlen, CHUNK: tl.constexpr):
    """m(prev, last) exp(A_last) of chunk c; dA_cumsum points at the first chunk of its head."""
    factor = decay(tl.load(dA_cumsum + c * CHUNK + CHUNK - 1))
    if seq_idx is not None:
        before, end = document_before(seq_idx, b, c, seqlen, CHUNK), document_at_end(seq_idx, b, c, seqlen, CHUNK)
        factor = tl.where(before == end, factor, 0.0)
    return factor


@triton.jit
def state_passing_kernel(states, dA_cumsum, initial_states, initial_strides, seq_idx, prev_states, final_states, seqlen,
                         nchunks, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr,
                         BLOCK: tl.constexpr, STAGES: tl.constexpr):
    SIZE: tl.constexpr = HEADDIM * DSTATE
    tile, h, _, b = unpack_program((SIZE + BLOCK - 1) // BLOCK, NHEADS, 1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside, wide = offs < SIZE, offs.to(tl.int64)
    if initial_states is None:
        state = tl.zeros([BLOCK], tl.float32)
    else:
        initial_states += b * initial_strides[0] + h * initial_strides[1]
        state = tl.load(initial_states + wide // DSTATE * initial_strides[2] + wide % DSTATE * initial_strides[3], mask=inside,
                        other=0.0).to(tl.float32)
    dA_cumsum += (b * NHEADS + h) * nchunks * CHUNK
    at = (b * nchunks * NHEADS + h) * SIZE + offs
    for c in tl.range(0, nchunks, num_stages=STAGES):
        tl.store(prev_states + at, state.to(prev_states.dtype.element_ty), mask=inside)
        factor = carried_decay(dA_cumsum, seq_idx, b, c, seqlen, CHUNK)
        state = factor * state + tl.load(states + at, mask=inside, other=0.0)
        at += NHEADS * SIZE
    tl.store(final_states + (b * NHEADS + h) * SIZE + offs, state, mask=inside)


def state_passing(i: SSDInputs, states, dA_cumsum) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states, fp32."""
    prev_states = torch.empty_like(states, dtype=i.states_dtype)
    final_states = torch.empty(i.batch, *states.shape[2:], device=states.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    initial_strides = None if i.initial_states is None else i.initial_states.stride()
    launch(
        state_passing_kernel, cdiv(i.headdim * i.dstate, config["BLOCK"]) * i.nheads * i.batch,
        states, dA_cumsum, i.initial_states, initial_strides, i.seq_idx, prev_states, final_states, i.seqlen, i.nchunks,
        i.nheads, i.headdim, i.dstate, i.chunk_size, config["BLOCK"], config.num_stages, num_warps=config.num_warps)
    return prev_states, final_states
