"""state_passing_bwd, equations (14) and (22): the recurrence over chunks in reverse.

    dS_c = G_{c+1},  G_c = m(prev, last) exp(A_last) G_{c+1} + dH_c,  s_c = m(prev, last) exp(A_last) <H_c, G_{c+1}>

Reads dprev_states, dH, (batch, nchunks, nheads, headdim, dstate) fp32, prev_states, H, of the same shape, dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32 and dfinal_states, the last G, (batch, nheads, headdim, dstate), any strides. Writes
dstates, dS, shaped as dprev_states in the dtype of x; dinitial_states, G_0, (batch, nheads, headdim, dstate) fp32; and s as
partial sums over tiles of the state, (batch, nheads, nchunks, ntiles) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, get_sizes, output, strides
from ...kernels.device import unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import SSDInputs
from .state_passing import carried_decay, offsets_any_strides

CONFIGS = ConfigSpace(
    "state_passing_bwd",
    axes={"BLOCK": None},
    entries=((1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5), (128, 1, 8)),
)


@triton.jit(do_not_specialize=COUNTS)
def state_passing_bwd_kernel(dprev_states, prev_states, dA_cumsum, dfinal_states, seq_idx, dstates, dinitial_states, s_tiles,
                             dfinal_strides, dinitial_strides, seqlen, nchunks, SIZES: tl.constexpr, BLOCK: tl.constexpr,
                             STAGES: tl.constexpr):
    SIZE: tl.constexpr = SIZES.headdim * SIZES.dstate
    NTILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tile, h, _, b = unpack_program(NTILES, SIZES.nheads, 1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    grad = tl.zeros([BLOCK], tl.float32)
    if dfinal_states is not None:
        at_any = offsets_any_strides(dfinal_strides, b, h, offs, SIZES.dstate)
        grad = tl.load(dfinal_states + at_any, mask=inside, other=0.0).to(tl.float32)
    dA_cumsum += (b * SIZES.nheads + h) * nchunks * SIZES.chunk
    if seq_idx is not None:
        seq_idx += b * seqlen
    s_tiles += (b * SIZES.nheads + h) * nchunks * NTILES + tile
    at = ((b * nchunks + nchunks - 1) * SIZES.nheads + h) * SIZE + offs
    for i in tl.range(0, nchunks, num_stages=STAGES):
        c = nchunks - 1 - i
        tl.store(dstates + at, grad.to(dstates.dtype.element_ty), mask=inside)
        factor = carried_decay(dA_cumsum, seq_idx, c, seqlen, SIZES.chunk)
        before = tl.load(prev_states + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(s_tiles + c * NTILES, factor * tl.sum(before * grad, 0))
        grad = factor * grad + tl.load(dprev_states + at, mask=inside, other=0.0)
        at -= SIZES.nheads * SIZE
    if dinitial_states is not None:
        at_any = offsets_any_strides(dinitial_strides, b, h, offs, SIZES.dstate)
        tl.store(dinitial_states + at_any, grad, mask=inside)


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
        dprev_states, prev_states, dA_cumsum, dfinal_states, i.seq_idx, dstates, dinitial_states, s_tiles,
        strides(dfinal_states), strides(dinitial_states), i.seqlen, i.nchunks, get_sizes(i), config["BLOCK"],
        config.num_stages, num_warps=config.num_warps)
    return dstates, dinitial_states, s_tiles
