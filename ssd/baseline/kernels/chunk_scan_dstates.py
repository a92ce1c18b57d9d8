"""chunk_scan_dstates, equation (13): what a chunk's outputs add to the gradient of the state before it.

    dH = sum_i m(prev, i) exp(A_i) dy_i^T C_i

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides, and dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32. Writes dprev_states, dH, (batch, nchunks, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, get_sizes
from ...kernels.device import chunk_offset, document_before, state_offset, step_offset
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs
from .chunk_state import count_state_tiles, store_state, unpack_state_tile, weighted_outer

CONFIGS = ConfigSpace(
    "chunk_scan_dstates",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4),
             (64, 128, 64, 4, 2), (64, 128, 128, 4, 2)),
    staged=(("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_scan_dstates_kernel(dy, C, dA_cumsum, seq_idx, dprev_states, strides, seqlen, nchunks, SIZES: tl.constexpr,
                              PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_p, offs_n, h, c, b = unpack_state_tile(nchunks, SIZES, BLOCK_P, BLOCK_N)
    token = c * SIZES.chunk
    document = 0
    if seq_idx is not None:
        document = document_before(seq_idx + b * seqlen, token)
        seq_idx += b * seqlen + token
    acc = weighted_outer(dy + chunk_offset(strides.dy, b, token, h), strides.dy,
                         C + chunk_offset(strides.C, b, token, h // (SIZES.nheads // SIZES.ngroups)), strides.C,
                         None, dA_cumsum + step_offset(b, h, c, nchunks, SIZES), seq_idx, document,
                         tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32), offs_p, offs_n, False, SIZES, BLOCK_K, PRECISION)
    store_state(dprev_states + state_offset(b, c, h, nchunks, SIZES), offs_p, offs_n, acc, SIZES)


def chunk_scan_dstates(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, options: Options) -> Tensor:
    """Returns dprev_states, fp32."""
    dprev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    launch(
        chunk_scan_dstates_kernel, count_state_tiles(i, config) * i.nheads * i.nchunks * i.batch,
        dy, i.C, dA_cumsum, i.seq_idx, dprev_states, Strides(C=i.C.stride(), dy=dy.stride()), i.seqlen, i.nchunks, get_sizes(i),
        options.precision, **config.launch)
    return dprev_states
