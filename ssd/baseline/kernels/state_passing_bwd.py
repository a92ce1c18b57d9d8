"""state_passing_bwd, equations (14) and (22): the recurrence over chunks in reverse.

Reads dprev_states (batch, nchunks, nheads, headdim, dstate) fp32, prev_states of the same shape, dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32 and dfinal_states (batch, nheads, headdim, dstate), any strides. Writes dstates,
shaped as dprev_states in the dtype of x; dinitial_states (batch, nheads, headdim, dstate) fp32; and s as partial sums
over tiles of the state, (batch, nheads, nchunks, ntiles) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv, output, strides
from ...kernels.device import unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import SSDInputs
from .state_passing import carried_decay

CONFIGS = ConfigSpace(
    "state_passing_bwd",
    axes={"BLOCK": None},
    entries=((1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5), (128, 1, 8)),
)


@triton.jit
def state_passing_bwd_kernel(dprev_states, prev_states, dA_cumsum, dfinal_states, dfinal_strides, seq_idx, dstates,
                             dinitial_states, dinitial_strides, s_tiles, seqlen, nchunks, NHEADS: tl.constexpr,
                             HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
                             STAGES: tl.constexpr):
    SIZE: tl.constexpr = HEADDIM * DSTATE
    NTILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tile, h, _, b = unpack_program(NTILES, NHEADS, 1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside, wide = offs < SIZE, offs.to(tl.int64)
    if dfinal_states is None:
        grad = tl.zeros([BLOCK], tl.float32)
    else:
        dfinal_states += b * dfinal_strides[0] + h * dfinal_strides[1]
        grad = tl.load(dfinal_states + wide // DSTATE * dfinal_strides[2] + wide % DSTATE * dfinal_strides[3], mask=inside,
                       other=0.0).to(tl.float32)
    dA_cumsum += (b * NHEADS + h) * nchunks * CHUNK
    s_tiles += (b * NHEADS + h) * nchunks * NTILES + tile
    at = ((b * nchunks + nchunks - 1) * NHEADS + h) * SIZE + offs
    for i in tl.range(0, nchunks, num_stages=STAGES):
        c = nchunks - 1 - i
        tl.store(dstates + at, grad.to(dstates.dtype.element_ty), mask=inside)
        factor = carried_decay(dA_cumsum, seq_idx, b, c, seqlen, CHUNK)
        before = tl.load(prev_states + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(s_tiles + c * NTILES, factor * tl.sum(before * grad, 0))
        grad = factor * grad + tl.load(dprev_states + at, mask=inside, other=0.0)
        at -= NHEADS * SIZE
    if dinitial_states is not None:
        dinitial_states += b * dinitial_strides[0] + h * dinitial_strides[1]
        tl.store(dinitial_states + wide // DSTATE * dinitial_strides[2] + wide % DSTATE * dinitial_strides[3], grad,
                 mask=inside)


def state_passing_bwd(i: SSDInputs, dprev_states: Tensor, prev_states: Tensor, dA_cumsum: Tensor,
                      dfinal_states: Tensor | None, into: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dstates, dinitial_states (None without initial_states) and the partial sums of s."""
    config = CONFIGS.pick(i)
    ntiles = cdiv(i.headdim * i.dstate, config["BLOCK"])
    dstates = torch.empty_like(dprev_states, dtype=i.x.dtype)
    dinitial_states = None if i.initial_states is None else output(i.initial_states, into, torch.float32)
    s_tiles = torch.empty(i.batch, i.nheads, i.nchunks, ntiles, device=i.x.device, dtype=torch.float32)
    launch(
        state_passing_bwd_kernel, ntiles * i.nheads * i.batch,
        dprev_states, prev_states, dA_cumsum, dfinal_states, strides(dfinal_states), i.seq_idx, dstates, dinitial_states,
        strides(dinitial_states), s_tiles, i.seqlen, i.nchunks, i.nheads, i.headdim, i.dstate, i.chunk_size, config["BLOCK"],
        config.num_stages, num_warps=config.num_warps)
    return dstates, dinitial_states, s_tiles
