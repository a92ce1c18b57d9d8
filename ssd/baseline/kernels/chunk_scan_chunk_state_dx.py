"""chunk_scan_chunk_state_dx, equations (18), (19), (21): dx, and the sums over headdim that ddt, q and dD need.

Reads CB (batch, nchunks, ngroups, chunk_size, chunk_size) fp32; x, dy (batch, seqlen, nheads, headdim) and B (batch,
seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; dstates (batch,
nchunks, nheads, headdim, dstate); D (nheads,) or (nheads, headdim). Writes dx, any strides; (u + v) . x and q, both
(batch, nheads, nchunks, chunk_size) fp32; and dD as partial sums over tiles of tokens, (batch * nchunks * ntiles,
nheads, headdim or 1) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import output, per_channel_strides
from ...kernels.device import causal, chunk_offset, decay, document_at_end, product, unpack_program
from ...kernels.sum_parts import sum_first
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs
from .chunk_state import weights_to_end

CONFIGS = ConfigSpace(
    "chunk_scan_chunk_state_dx",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 8, 3), (64, 64, 32, 64, 4, 3), (128, 64, 32, 64, 4, 3),
             (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2), (128, 64, 32, 64, 8, 3), (64, 64, 32, 128, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"), ("BLOCK_N", "BLOCK_P")),
)


@triton.jit
def chunk_scan_chunk_state_dx_kernel(
        CB, x, x_strides, B, B_strides, dy, dy_strides, D, D_strides, dt, dA_cumsum, seq_idx, dstates, dx, dx_strides, ddt, q,
        dD_tiles, seqlen, nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
        CHUNK: tl.constexpr, D_PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES: tl.constexpr = CHUNK // BLOCK_M
    tile, h, c, b = unpack_program(NTILES, NHEADS, nchunks)
    g = h // (NHEADS // NGROUPS)
    token, first = c * CHUNK, tile * BLOCK_M
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    offs_j = first + tl.arange(0, BLOCK_M)
    in_j = offs_j < rows
    x += chunk_offset(x_strides, b, token, h)
    B += chunk_offset(B_strides, b, token, g)
    dy += chunk_offset(dy_strides, b, token, h)
    dx += chunk_offset(dx_strides, b, token, h)
    CB += ((b * nchunks + c) * NGROUPS + g) * CHUNK * CHUNK
    per_head = ((b * NHEADS + h) * nchunks + c) * CHUNK
    dA_cumsum += per_head
    dt += per_head
    dstates += ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    document = 0
    if seq_idx is not None:
        document = document_at_end(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token

    dt_j = tl.load(dt + offs_j)
    dA_j = tl.load(dA_cumsum + offs_j)
    to_end = weights_to_end(offs_j, None, dA_cumsum, seq_idx, rows - 1, document)[:, None]
    row = ((b * nchunks + c) * NTILES + tile) * NHEADS + h  # of dD_tiles
    ddt_j = tl.zeros([BLOCK_M], tl.float32)
    v_x = tl.zeros([BLOCK_M], tl.float32)
    dD_sum = 0.0
    for first_p in range(0, HEADDIM, BLOCK_P):
        offs_p = first_p + tl.arange(0, BLOCK_P)
        in_p = offs_p < HEADDIM
        in_jp = in_j[:, None] & in_p[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
        for start in range(0, DSTATE, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            B_j = tl.load(B + offs_j[:, None] * B_strides[1] + n[None, :] * B_strides[3],
                          mask=in_j[:, None] & (n < DSTATE)[None, :], other=0.0)
            dS_t = tl.load(dstates + offs_p[None, :] * DSTATE + n[:, None], mask=in_p[None, :] & (n < DSTATE)[:, None],
                           other=0.0)
            acc = tl.dot(B_j.to(DTYPE), dS_t.to(DTYPE), acc, input_precision=PRECISION)
        acc *= to_end
        x_j = tl.load(x + offs_j[:, None] * x_strides[1] + offs_p[None, :] * x_strides[3], mask=in_jp, other=0.0).to(tl.float32)
        v_x += tl.sum(acc * x_j, 1)

        for start in range(first // BLOCK_K * BLOCK_K, rows, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            CB_ji = tl.load(CB + i[None, :] * CHUNK + offs_j[:, None])
            weights = CB_ji * decay(tl.load(dA_cumsum + i)[None, :] - dA_j[:, None])
            # selected, not multiplied by 0: outside the mask CB may never have been written
            weights = tl.where(causal(i, offs_j, seq_idx, rows, True), weights, 0.0)
            dy_i = tl.load(dy + i[:, None] * dy_strides[1] + offs_p[None, :] * dy_strides[3],
                           mask=(i < rows)[:, None] & in_p[None, :], other=0.0)
            acc = tl.dot(weights.to(DTYPE), dy_i, acc, input_precision=PRECISION)
        ddt_j += tl.sum(acc * x_j, 1)
        acc *= dt_j[:, None]
        if D is not None:
            skip = tl.load(D + h * D_strides[0] + offs_p.to(tl.int64) * D_strides[1], mask=in_p, other=0.0).to(tl.float32)
            dy_j = tl.load(dy + offs_j[:, None] * dy_strides[1] + offs_p[None, :] * dy_strides[3], mask=in_jp, other=0.0)
            acc += skip[None, :] * dy_j.to(tl.float32)
            dD_p = tl.sum(product(dy_j.to(tl.float32), x_j), 0)
            if D_PER_CHANNEL:
                tl.store(dD_tiles + row * HEADDIM + offs_p, dD_p, mask=in_p)
            dD_sum += tl.sum(dD_p, 0)
        tl.store(dx + offs_j[:, None] * dx_strides[1] + offs_p[None, :] * dx_strides[3], acc.to(dx.dtype.element_ty),
                 mask=in_jp)
    if D is not None and not D_PER_CHANNEL:
        tl.store(dD_tiles + row, dD_sum)
    tl.store(ddt + per_head + offs_j, ddt_j)
    tl.store(q + per_head + offs_j, dt_j * v_x)


def chunk_scan_chunk_state_dx(i: SSDInputs, CB: Tensor, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, dy: Tensor,
                              options: Options, into: Tensor | None):
    """Returns dx, (u + v) . x, q, and dD (None without D), summed."""
    dx, ddt, q, dD_tiles = output(i.x, into), torch.empty_like(dt), torch.empty_like(dt), None
    config = CONFIGS.pick(i)
    ntiles = i.chunk_size // config["BLOCK_M"]
    per_channel = i.D is not None and i.D.dim() == 2
    if i.D is not None:
        dD_tiles = torch.empty(i.batch * i.nchunks * ntiles, *i.D.shape, device=dt.device, dtype=torch.float32)
    launch(
        chunk_scan_chunk_state_dx_kernel, ntiles * i.nheads * i.nchunks * i.batch,
        CB, i.x, i.x.stride(), i.B, i.B.stride(), dy, dy.stride(), i.D, per_channel_strides(i.D), dt, dA_cumsum, i.seq_idx,
        dstates, dx, dx.stride(), ddt, q, dD_tiles, i.seqlen, i.nchunks, i.nheads, i.ngroups, i.headdim, i.dstate,
        i.chunk_size, per_channel, options.precision, **config.launch)
    return dx, ddt, q, None if dD_tiles is None else sum_first(dD_tiles, output(dD_tiles[0]))
