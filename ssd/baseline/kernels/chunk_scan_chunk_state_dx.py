"""chunk_scan_chunk_state_dx, equations (18), (19), (21): dx, and the sums over headdim that ddt, q and dD need.

    u_j = sum_{i>=j} m(j, i) CB_ij exp(A_i - A_j) dy_i,  v_j = m(j, last) exp(A_last - A_j) dS B_j
    dx_j = dt_j (u_j + v_j) + D dy_j,  q_j = dt_j (v_j . x_j),  dD = sum_j dy_j x_j

Reads CB (batch, nchunks, ngroups, chunk_size, chunk_size) fp32; x, dy (batch, seqlen, nheads, headdim) and B (batch,
seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; dstates, dS, (batch,
nchunks, nheads, headdim, dstate); D (nheads,) or (nheads, headdim). Writes dx, any strides; (u + v) . x and q, both
(batch, nheads, nchunks, chunk_size) fp32; and dD as partial sums over tiles of tokens, (batch * nchunks * ntiles,
nheads, headdim or 1) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, get_sizes, output, strides
from ...kernels.device import (
    CB_offset,
    causal,
    chunk_offset,
    decay,
    decays_to_end,
    load_skip,
    load_state_t,
    load_tokens,
    product,
    state_offset,
    step_offset,
    store_tokens,
    unpack_program,
)
from ...kernels.sum_parts import sum_first
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_scan_chunk_state_dx",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 8, 3), (64, 64, 32, 64, 4, 3), (128, 64, 32, 64, 4, 3),
             (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2), (128, 64, 32, 64, 8, 3), (64, 64, 32, 128, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"), ("BLOCK_N", "BLOCK_P")),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_scan_chunk_state_dx_kernel(
        CB, x, B, dy, D, dt, dA_cumsum, seq_idx, dstates, dx, u_v_x, q, dD_tiles, strides, seqlen, nchunks, SIZES: tl.constexpr,
        PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES: tl.constexpr = SIZES.chunk // BLOCK_M
    tile, h, c, b = unpack_program(NTILES, SIZES.nheads, nchunks)
    g = h // (SIZES.nheads // SIZES.ngroups)
    token, first = c * SIZES.chunk, tile * BLOCK_M
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    offs_j = first + tl.arange(0, BLOCK_M)
    x += chunk_offset(strides.x, b, token, h)
    B += chunk_offset(strides.B, b, token, g)
    dy += chunk_offset(strides.dy, b, token, h)
    dx += chunk_offset(strides.dx, b, token, h)
    CB += CB_offset(b, c, g, nchunks, SIZES)
    steps = step_offset(b, h, c, nchunks, SIZES)
    dA_cumsum += steps
    dt += steps
    dstates += state_offset(b, c, h, nchunks, SIZES)
    document = 0
    if seq_idx is not None:
        seq_idx += b * seqlen + token
        document = tl.load(seq_idx + rows - 1)

    dt_j = tl.load(dt + offs_j)
    dA_j = tl.load(dA_cumsum + offs_j)
    to_end = decays_to_end(offs_j, None, dA_cumsum, seq_idx, rows - 1, document)[:, None]
    row = ((b * nchunks + c) * NTILES + tile) * SIZES.nheads + h  # of dD_tiles
    u_v_x_j = tl.zeros([BLOCK_M], tl.float32)
    v_x = tl.zeros([BLOCK_M], tl.float32)
    dD_sum = 0.0
    for first_p in range(0, SIZES.headdim, BLOCK_P):
        offs_p = first_p + tl.arange(0, BLOCK_P)
        acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
        for start in range(0, SIZES.dstate, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            B_j = load_tokens(B, strides.B, offs_j, n, rows, SIZES.dstate)  # [BLOCK_M, BLOCK_N]
            dS_t = load_state_t(dstates, offs_p, n, SIZES)  # [BLOCK_N, BLOCK_P]
            acc = tl.dot(B_j.to(DTYPE), dS_t.to(DTYPE), acc, input_precision=PRECISION)
        acc *= to_end
        x_j = load_tokens(x, strides.x, offs_j, offs_p, rows, SIZES.headdim).to(tl.float32)
        v_x += tl.sum(acc * x_j, 1)

        for start in range(first // BLOCK_K * BLOCK_K, rows, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            CB_ji = tl.load(CB + i[None, :] * SIZES.chunk + offs_j[:, None])
            weights = CB_ji * decay(tl.load(dA_cumsum + i)[None, :] - dA_j[:, None])
            # selected, not multiplied by 0: outside the mask CB may never have been written
            weights = tl.where(causal(i, offs_j, seq_idx, rows, True), weights, 0.0)
            dy_i = load_tokens(dy, strides.dy, i, offs_p, rows, SIZES.headdim)
            acc = tl.dot(weights.to(DTYPE), dy_i, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_P]
        u_v_x_j += tl.sum(acc * x_j, 1)
        acc *= dt_j[:, None]
        if D is not None:
            dy_j = load_tokens(dy, strides.dy, offs_j, offs_p, rows, SIZES.headdim).to(tl.float32)
            acc += load_skip(D, strides.D, h, offs_p, SIZES.headdim) * dy_j
            dD_p = tl.sum(product(dy_j, x_j), 0)
            if len(strides.D) == 2:
                tl.store(dD_tiles + row * SIZES.headdim + offs_p, dD_p, mask=offs_p < SIZES.headdim)
            dD_sum += tl.sum(dD_p, 0)
        store_tokens(dx, strides.dx, offs_j, offs_p, rows, acc, SIZES.headdim)
    if D is not None and len(strides.D) == 1:
        tl.store(dD_tiles + row, dD_sum)
    tl.store(u_v_x + steps + offs_j, u_v_x_j)
    tl.store(q + steps + offs_j, dt_j * v_x)


def chunk_scan_chunk_state_dx(i: SSDInputs, CB: Tensor, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, dy: Tensor,
                              options: Options, into: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns dx, (u + v) . x, q, and dD (None without D), summed."""
    dx, u_v_x, q, dD_tiles = output(i.x, into), torch.empty_like(dt), torch.empty_like(dt), None
    config = CONFIGS.pick(i)
    ntiles = i.chunk_size // config["BLOCK_M"]
    if i.D is not None:
        dD_tiles = torch.empty(i.batch * i.nchunks * ntiles, *i.D.shape, device=dt.device, dtype=torch.float32)
    launch(
        chunk_scan_chunk_state_dx_kernel, ntiles * i.nheads * i.nchunks * i.batch,
        CB, i.x, i.B, dy, i.D, dt, dA_cumsum, i.seq_idx, dstates, dx, u_v_x, q, dD_tiles,
        Strides(x=i.x.stride(), B=i.B.stride(), D=strides(i.D), dy=dy.stride(), dx=dx.stride()), i.seqlen, i.nchunks,
        get_sizes(i), options.precision, **config.launch)
    return dx, u_v_x, q, None if dD_tiles is None else sum_first(dD_tiles, output(dD_tiles[0]))
