"""bmm_chunk, equation (9): CB_ij = C_i . B_j inside each chunk, once per group.

Reads B, C (batch, seqlen, ngroups, dstate), any strides. Writes CB (batch, nchunks, ngroups, chunk_size, chunk_size)
fp32, or in a dtype asked for. Tiles that lie wholly above the diagonal are left unwritten: nothing reads them.
"""

import torch
import triton
import triton.language as tl

from ...kernels.arguments import COUNTS, Strides, get_sizes, triton_dtype
from ...kernels.device import CB_offset, chunk_offset, load_tokens, load_tokens_t, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "bmm_chunk",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "chunk_size", "BLOCK_K": "dstate"},
    entries=((64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 128, 4, 2), (64, 128, 64, 4, 3)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit(do_not_specialize=COUNTS)
def bmm_chunk_kernel(B, C, CB, strides, seqlen, nchunks, SIZES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = SIZES.chunk // BLOCK_N
    tile, g, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_N, SIZES.ngroups, nchunks)
    first_i, first_j = tile // NTILES_N * BLOCK_M, tile % NTILES_N * BLOCK_N
    token = c * SIZES.chunk
    rows = seqlen - token
    if first_j >= first_i + BLOCK_M or first_i >= rows:
        return
    offs_i, offs_j = first_i + tl.arange(0, BLOCK_M), first_j + tl.arange(0, BLOCK_N)
    C += chunk_offset(strides.C, b, token, g)
    B += chunk_offset(strides.B, b, token, g)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZES.dstate, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        C_i = load_tokens(C, strides.C, offs_i, k, rows, SIZES.dstate)  # [BLOCK_M, BLOCK_K]
        B_t = load_tokens_t(B, strides.B, offs_j, k, rows, SIZES.dstate)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(C_i.to(DTYPE), B_t.to(DTYPE), acc, input_precision=PRECISION)
    tl.store(CB + CB_offset(b, c, g, nchunks, SIZES) + offs_i[:, None] * SIZES.chunk + offs_j[None, :], acc)


def bmm_chunk(i: SSDInputs, options: Options, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns CB."""
    CB = torch.empty(i.batch, i.nchunks, i.ngroups, i.chunk_size, i.chunk_size, device=i.x.device, dtype=dtype)
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * (i.chunk_size // config["BLOCK_N"])
    launch(
        bmm_chunk_kernel, tiles * i.ngroups * i.nchunks * i.batch,
        i.B, i.C, CB, Strides(B=i.B.stride(), C=i.C.stride()), i.seqlen, i.nchunks, get_sizes(i), triton_dtype(i.x.dtype),
        options.precision, **config.launch)
    return CB
