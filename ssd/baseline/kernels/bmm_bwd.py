"""bmm_bwd, second sums of equations (16) and (17): what CB adds to dC and dB, on top of what came through the states.

    dC_i += sum_{j<=i} dCB_ij B_j,  dB_j += sum_{i>=j} dCB_ij C_i

Reads dCB (batch, nchunks, ngroups, chunk_size, chunk_size); B or C (batch, seqlen, ngroups, dstate), any strides; what
came through the states, as partial sums (nsplits, batch, seqlen, ngroups, dstate) fp32. Writes dC or dB, any strides.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, get_sizes, output
from ...kernels.device import CB_offset, chunk_offset, load_tokens, store_tokens, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "bmm_bwd",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 32, 4, 3)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit(do_not_specialize=COUNTS)
def bmm_bwd_kernel(dCB, other, parts, grad, other_strides, grad_strides, seqlen, nchunks, part_stride, SIZES: tl.constexpr,
                   NPARTS: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    DTYPE: tl.constexpr = dCB.dtype.element_ty
    NTILES_N: tl.constexpr = (SIZES.dstate + BLOCK_N - 1) // BLOCK_N
    tile, g, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_N, SIZES.ngroups, nchunks)
    token, first = c * SIZES.chunk, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    offs_m, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    in_mn = (offs_m < rows)[:, None] & (n < SIZES.dstate)[None, :]
    dCB += CB_offset(b, c, g, nchunks, SIZES)
    other += chunk_offset(other_strides, b, token, g)
    parts += ((b * seqlen + token) * SIZES.ngroups + g) * SIZES.dstate
    grad += chunk_offset(grad_strides, b, token, g)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    in_parts = offs_m[:, None] * (SIZES.ngroups * SIZES.dstate) + n[None, :]
    for s in tl.static_range(NPARTS):
        acc += tl.load(parts + tl.full([], s, tl.int64) * part_stride + in_parts, mask=in_mn, other=0.0)
    if TRANSPOSED:  # rows are j: only i >= j reach them
        begin, end = first // BLOCK_K * BLOCK_K, rows
    else:
        begin, end = 0, tl.minimum(first + BLOCK_M, rows)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            at = k[None, :] * SIZES.chunk + offs_m[:, None]
            below = (k[None, :] >= offs_m[:, None]) & (k < rows)[None, :]
        else:
            at = offs_m[:, None] * SIZES.chunk + k[None, :]
            below = offs_m[:, None] >= k[None, :]
        # selected by position: above the diagonal dCB may never have been written
        pairs = tl.where(below, tl.load(dCB + at), 0.0)  # [BLOCK_M, BLOCK_K]
        other_k = load_tokens(other, other_strides, k, n, rows, SIZES.dstate)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(pairs.to(DTYPE), other_k.to(DTYPE), acc, input_precision=PRECISION)
    store_tokens(grad, grad_strides, offs_m, n, rows, acc, SIZES.dstate)


def _launch(i: SSDInputs, dCB: Tensor, other: Tensor, parts: Tensor, grad: Tensor, transposed: bool,
            options: Options) -> Tensor:
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        bmm_bwd_kernel, tiles * i.ngroups * i.nchunks * i.batch,
        dCB, other, parts, grad, other.stride(), grad.stride(), i.seqlen, i.nchunks, parts.stride(0), get_sizes(i),
        parts.shape[0], transposed, options.precision, **config.launch)
    return grad


def bmm_bwd_dB(i: SSDInputs, dCB: Tensor, parts: Tensor, options: Options, into: Tensor | None) -> Tensor:
    """Returns dB."""
    return _launch(i, dCB, i.C, parts, output(i.B, into), True, options)


def bmm_bwd_dC(i: SSDInputs, dCB: Tensor, parts: Tensor, options: Options, into: Tensor | None) -> Tensor:
    """Returns dC."""
    return _launch(i, dCB, i.B, parts, output(i.C, into), False, options)
