"""bmm_bwd, second sums of equations (16) and (17): what CB adds to dC and dB, on top of what came through the states.

Reads dCB (batch, nchunks, ngroups, chunk_size, chunk_size); B or C (batch, seqlen, ngroups, dstate), any strides; what
came through the states, as partial sums (nsplits, batch, seqlen, ngroups, dstate) fp32. Writes dC = parts + dCB B, or
dB = parts + dCB^T C, any strides.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv, output
from ...kernels.device import chunk_offset, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "bmm_bwd",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 32, 4, 3)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit
def bmm_bwd_kernel(dCB, other, other_strides, parts, grad, grad_strides, seqlen, nchunks, part_stride,
                   NPARTS: tl.constexpr, NGROUPS: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr,
                   TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    DTYPE: tl.constexpr = dCB.dtype.element_ty
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    tile, g, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_N, NGROUPS, nchunks)
    token, first = c * CHUNK, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    offs_m, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    in_mn = (offs_m < rows)[:, None] & (n < DSTATE)[None, :]
    dCB += ((b * nchunks + c) * NGROUPS + g) * CHUNK * CHUNK
    other += chunk_offset(other_strides, b, token, g)
    parts += ((b * seqlen + token) * NGROUPS + g) * DSTATE
    grad += chunk_offset(grad_strides, b, token, g)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for s in tl.static_range(NPARTS):
        acc += tl.load(parts + tl.full([], s, tl.int64) * part_stride + offs_m[:, None] * (NGROUPS * DSTATE) + n[None, :],
                       mask=in_mn, other=0.0)
    if TRANSPOSED:  # rows are j: only i >= j reach them
        begin, end = first // BLOCK_K * BLOCK_K, rows
    else:
        begin, end = 0, tl.minimum(first + BLOCK_M, rows)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            at = k[None, :] * CHUNK + offs_m[:, None]
            below = (k[None, :] >= offs_m[:, None]) & (k < rows)[None, :]
        else:
            at = offs_m[:, None] * CHUNK + k[None, :]
            below = offs_m[:, None] >= k[None, :]
        # selected by position: above the diagonal dCB may never have been written
        pairs = tl.where(below, tl.load(dCB + at), 0.0)
        other_k = tl.load(other + k[:, None] * other_strides[1] + n[None, :] * other_strides[3],
                          mask=(k < rows)[:, None] & (n < DSTATE)[None, :], other=0.0)
        acc = tl.dot(pairs.to(DTYPE), other_k.to(DTYPE), acc, input_precision=PRECISION)
    tl.store(grad + offs_m[:, None] * grad_strides[1] + n[None, :] * grad_strides[3], acc.to(grad.dtype.element_ty), mask=in_mn)


def _launch(i: SSDInputs, dCB: Tensor, other: Tensor, parts: Tensor, grad: Tensor, transposed: bool,
            options: Options) -> Tensor:
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        bmm_bwd_kernel, tiles * i.ngroups * i.nchunks * i.batch,
        dCB, other, other.stride(), parts, grad, grad.stride(), i.seqlen, i.nchunks, parts.stride(0), parts.shape[0],
        i.ngroups, i.dstate, i.chunk_size, transposed, options.precision, **config.launch)
    return grad


def bmm_bwd_dB(i: SSDInputs, dCB: Tensor, parts: Tensor, options: Options, into: Tensor | None) -> Tensor:
    """Returns dB."""
    return _launch(i, dCB, i.C, parts, output(i.B, into), True, options)


def bmm_bwd_dC(i: SSDInputs, dCB: Tensor, parts: Tensor, options: Options, into: Tensor | None) -> Tensor:
    """Returns dC."""
    return _launch(i, dCB, i.B, parts, output(i.C, into), False, options)
