"""chunk_state, equation (7): what a chunk alone adds to the state; and (11), the state at the end of a packed document.

Reads x (batch, seqlen, nheads, headdim), B (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32. Writes states (batch, nchunks, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl

from ...kernels.arguments import cdiv
from ...kernels.device import chunk_offset, decay, document_at_end, document_before, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_state",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4),
             (64, 128, 64, 4, 2), (64, 128, 128, 4, 2), (64, 64, 32, 4, 4)),
    staged=(("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit
def weights_to_end(k, dt, dA_cumsum, seq_idx, end, document):
    """m(k, end) exp(A_end - A_k), times dt_k unless dt is None, for tokens k of a chunk, 0 past the end.

    dt, dA_cumsum and seq_idx point at the chunk's first token; document is that of token `end`.
    """
    in_k = k <= end
    w = decay(tl.load(dA_cumsum + end) - tl.load(dA_cumsum + k, mask=in_k, other=0.0))
    if dt is None:
        w = tl.where(in_k, w, 0.0)
    else:
        w *= tl.load(dt + k, mask=in_k, other=0.0)
    if seq_idx is not None:
        w = tl.where(tl.load(seq_idx + k, mask=in_k, other=-1) == document, w, 0.0)
    return w


@triton.jit
def weights_from_start(k, dA_cumsum, seq_idx, rows, document):
    """m(prev, k) exp(A_k); `document` is that of the token before the chunk."""
    in_k = k < rows
    w = decay(tl.load(dA_cumsum + k, mask=in_k, other=0.0))
    if seq_idx is not None:
        w = tl.where(tl.load(seq_idx + k, mask=in_k, other=-1) == document, w, 0.0)
    return w


@triton.jit
def weighted_outer(u, u_strides, v, v_strides, dt, dA_cumsum, seq_idx, document, rows, offs_p, offs_n, TO_END: tl.constexpr,
                   HEADDIM: tl.constexpr, DSTATE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """sum_k w_k u_k^T v_k over the first `rows` tokens of a chunk, [BLOCK_P, BLOCK_N] fp32.

    u, v, dt, dA_cumsum and seq_idx point at the chunk's first token (of their head or group). w is `weights_to_end` with the
    last of the rows as the end, or `weights_from_start`.
    """
    DTYPE: tl.constexpr = u.dtype.element_ty
    acc = tl.zeros([offs_p.shape[0], offs_n.shape[0]], tl.float32)
    for start in range(0, rows, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < rows
        u_t = tl.load(u + offs_p[:, None] * u_strides[3] + k[None, :] * u_strides[1],
                      mask=(offs_p < HEADDIM)[:, None] & in_k[None, :], other=0.0)
        v_k = tl.load(v + k[:, None] * v_strides[1] + offs_n[None, :] * v_strides[3],
                      mask=in_k[:, None] & (offs_n < DSTATE)[None, :], other=0.0)
        if TO_END:
            w = weights_to_end(k, dt, dA_cumsum, seq_idx, rows - 1, document)
        else:
            w = weights_from_start(k, dA_cumsum, seq_idx, rows, document)
        acc = tl.dot((u_t.to(tl.float32) * w[None, :]).to(DTYPE), v_k.to(DTYPE), acc, input_precision=PRECISION)
    return acc


@triton.jit
def chunk_state_kernel(x, x_strides, B, B_strides, dt, dA_cumsum, seq_idx, states, seqlen, nchunks, NHEADS: tl.constexpr,
                       NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr,
                       PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    tile, h, c, b = unpack_program((HEADDIM + BLOCK_P - 1) // BLOCK_P * NTILES_N, NHEADS, nchunks)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    token = c * CHUNK
    per_head = ((b * NHEADS + h) * nchunks + c) * CHUNK
    document = 0
    if seq_idx is not None:
        document = document_at_end(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token
    acc = weighted_outer(x + chunk_offset(x_strides, b, token, h), x_strides,
                         B + chunk_offset(B_strides, b, token, h // (NHEADS // NGROUPS)), B_strides,
                         dt + per_head, dA_cumsum + per_head, seq_idx, document,
                         tl.minimum(CHUNK, seqlen - token).to(tl.int32), offs_p, offs_n, True, HEADDIM, DSTATE, BLOCK_K,
                         PRECISION)
    states += ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    tl.store(states + offs_p[:, None] * DSTATE + offs_n[None, :], acc,
             mask=(offs_p < HEADDIM)[:, None] & (offs_n < DSTATE)[None, :])


@triton.jit
def varlen_states_kernel(x, x_strides, B, B_strides, dt, dA_cumsum, seq_idx, cu_seqlens, prev_states, states, seqlen,
                         nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
                         CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr):
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    tile, h, doc, _ = unpack_program((HEADDIM + BLOCK_P - 1) // BLOCK_P * NTILES_N, NHEADS, tl.num_programs(0))
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    in_pn = (offs_p < HEADDIM)[:, None] & (offs_n < DSTATE)[None, :]
    states += (doc * NHEADS + h) * HEADDIM * DSTATE + offs_p[:, None] * DSTATE + offs_n[None, :]
    # values from the user that nobody has checked: kept inside the row
    start, end = tl.maximum(tl.load(cu_seqlens + doc), 0), tl.minimum(tl.load(cu_seqlens + doc + 1), seqlen)
    if start >= end:
        tl.store(states, tl.zeros([BLOCK_P, BLOCK_N], tl.float32), mask=in_pn)
        return
    c = ((end - 1) // CHUNK).to(tl.int64)
    token = c * CHUNK
    per_head = (h * nchunks + c) * CHUNK
    rows = (end - token).to(tl.int32)
    document = tl.load(seq_idx + end - 1)
    acc = weighted_outer(x + token * x_strides[1] + h * x_strides[2], x_strides,
                         B + token * B_strides[1] + h // (NHEADS // NGROUPS) * B_strides[2], B_strides,
                         dt + per_head, dA_cumsum + per_head, seq_idx + token, document, rows, offs_p, offs_n, True,
                         HEADDIM, DSTATE, BLOCK_K, PRECISION)
    if document == document_before(seq_idx, 0, c, 0, CHUNK):
        before = tl.load(prev_states + (c * NHEADS + h) * HEADDIM * DSTATE + offs_p[:, None] * DSTATE + offs_n[None, :],
                         mask=in_pn, other=0.0)
        acc += before.to(tl.float32) * decay(tl.load(dA_cumsum + per_head + rows - 1))
    tl.store(states, acc, mask=in_pn)


def chunk_state(i: SSDInputs, dt, dA_cumsum, options: Options) -> torch.Tensor:
    """Returns states, fp32."""
    states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    tiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        chunk_state_kernel, tiles * i.nheads * i.nchunks * i.batch,
        i.x, i.x.stride(), i.B, i.B.stride(), dt, dA_cumsum, i.seq_idx, states, i.seqlen, i.nchunks, i.nheads, i.ngroups,
        i.headdim, i.dstate, i.chunk_size, options.precision, **config.launch)
    return states


def varlen_states(i: SSDInputs, dt, dA_cumsum, prev_states, options: Options) -> torch.Tensor:
    """Returns the state at the end of each document of i.cu_seqlens, (ndocs, nheads, headdim, dstate) fp32."""
    ndocs = i.cu_seqlens.shape[0] - 1
    states = torch.empty(ndocs, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    tiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    launch(
        varlen_states_kernel, tiles * i.nheads * ndocs,
        i.x, i.x.stride(), i.B, i.B.stride(), dt, dA_cumsum, i.seq_idx, i.cu_seqlens, prev_states, states, i.seqlen,
        i.nchunks, i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size, options.precision, **config.launch)
    return states
