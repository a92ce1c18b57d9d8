"""chunk_scan_dstates, equation (13): what a chunk's outputs add to the gradient of the state before it.

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides, and dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32. Writes dprev_states (batch, nchunks, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...kernels.device import chunk_offset, document_before, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs
from .chunk_state import weighted_outer

CONFIGS = ConfigSpace(
    "chunk_scan_dstates",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4),
             (64, 128, 64, 4, 2), (64, 128, 128, 4, 2)),
    staged=(("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit
def chunk_scan_dstates_kernel(dy, dy_strides, C, C_strides, dA_cumsum, seq_idx, dprev_states, seqlen, nchunks,
                              NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
                              CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                              BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    tile, h, c, b = unpack_program((HEADDIM + BLOCK_P - 1) // BLOCK_P * NTILES_N, NHEADS, nchunks)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    token = c * CHUNK
    document = 0
    if seq_idx is not None:
        document = document_before(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token
    acc = weighted_outer(dy + chunk_offset(dy_strides, b, token, h), dy_strides,
                         C + chunk_offset(C_strides, b, token, h // (NHEADS // NGROUPS)), C_strides,
                         None, dA_cumsum + ((b * NHEADS + h) * nchunks + c) * CHUNK, seq_idx, document,
                         tl.minimum(CHUNK, seqlen - token).to(tl.int32), offs_p, offs_n, False, HEADDIM, DSTATE, BLOCK_K,
                         PRECISION)
    dprev_states += ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    tl.store(dprev_states + offs_p[:, None] * DSTATE + offs_n[None, :], acc,
             mask=(offs_p < HEADDIM)[:, None] & (offs_n < DSTATE)[None, :])


def chunk_scan_dstates(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, options: Options) -> Tensor:
    """Returns dprev_states, fp32."""
    dprev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    tiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        chunk_scan_dstates_kernel, tiles * i.nheads * i.nchunks * i.batch,
        dy, dy.stride(), i.C, i.C.stride(), dA_cumsum, i.seq_idx, dprev_states, i.seqlen, i.nchunks, i.nheads, i.ngroups,
        i.headdim, i.dstate, i.chunk_size, options.precision, **config.launch)
    return dprev_states
