"""chunk_scan, equations (10) and (5): the output, from CB, the tokens of the chunk and the state before it.

Reads CB (batch, nchunks, ngroups, chunk_size, chunk_size) fp32; x, z (batch, seqlen, nheads, headdim) and C (batch,
seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; prev_states (batch,
nchunks, nheads, headdim, dstate); D (nheads,) or (nheads, headdim). Writes out (batch, seqlen, nheads, headdim) in
the dtype of x and, where a backward will need it, y, the output before the gate.
"""

import torch
import triton
import triton.language as tl

from ...kernels.arguments import cdiv, per_channel_strides, strides
from ...kernels.device import causal, chunk_offset, decay, document_before, sigmoid, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs
from .chunk_state import weights_from_start

CONFIGS = ConfigSpace(
    "chunk_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 4, 3), (64, 64, 32, 128, 4, 3), (128, 64, 32, 64, 4, 3),
             (128, 64, 64, 64, 8, 3), (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2), (128, 64, 32, 64, 8, 3)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"), ("BLOCK_N", "BLOCK_P")),
)


@triton.jit
def chunk_scan_kernel(CB, x, x_strides, z, z_strides, C, C_strides, D, D_strides, dt, dA_cumsum, seq_idx, prev_states, out, y,
                      seqlen, nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr,
                      DSTATE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_P: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    tile, h, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_P, NHEADS, nchunks)
    first = tile // NTILES_P * BLOCK_M
    g = h // (NHEADS // NGROUPS)
    token = c * CHUNK
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    if first >= rows:
        return
    offs_i, offs_p = first + tl.arange(0, BLOCK_M), tile % NTILES_P * BLOCK_P + tl.arange(0, BLOCK_P)
    in_i, in_p = offs_i < rows, offs_p < HEADDIM
    x += chunk_offset(x_strides, b, token, h)
    C += chunk_offset(C_strides, b, token, g)
    CB += ((b * nchunks + c) * NGROUPS + g) * CHUNK * CHUNK
    dt += ((b * NHEADS + h) * nchunks + c) * CHUNK
    dA_cumsum += ((b * NHEADS + h) * nchunks + c) * CHUNK
    prev_states += ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    before = 0
    if seq_idx is not None:
        before = document_before(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token

    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for start in range(0, DSTATE, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        C_i = tl.load(C + offs_i[:, None] * C_strides[1] + n[None, :] * C_strides[3],
                      mask=in_i[:, None] & (n < DSTATE)[None, :], other=0.0)
        state_t = tl.load(prev_states + offs_p[None, :] * DSTATE + n[:, None],
                          mask=in_p[None, :] & (n < DSTATE)[:, None], other=0.0)
        acc = tl.dot(C_i.to(DTYPE), state_t.to(DTYPE), acc, input_precision=PRECISION)
    acc *= weights_from_start(offs_i, dA_cumsum, seq_idx, rows, before)[:, None]

    dA_i = tl.load(dA_cumsum + offs_i)
    for start in range(0, tl.minimum(first + BLOCK_M, rows), BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        CB_ij = tl.load(CB + offs_i[:, None] * CHUNK + j[None, :])
        weights = CB_ij * decay(dA_i[:, None] - tl.load(dA_cumsum + j)[None, :]) * tl.load(dt + j)[None, :]
        # selected, not multiplied by 0: above the diagonal CB may never have been written
        weights = tl.where(causal(offs_i, j, seq_idx, rows, False), weights, 0.0)
        x_j = tl.load(x + j[:, None] * x_strides[1] + offs_p[None, :] * x_strides[3],
                      mask=(j < rows)[:, None] & in_p[None, :], other=0.0)
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=PRECISION)

    in_ip = in_i[:, None] & in_p[None, :]
    if D is not None:
        skip = tl.load(D + h * D_strides[0] + offs_p.to(tl.int64) * D_strides[1], mask=in_p, other=0.0).to(tl.float32)[None, :]
        x_i = tl.load(x + offs_i[:, None] * x_strides[1] + offs_p[None, :] * x_strides[3], mask=in_ip, other=0.0)
        acc += skip * x_i.to(tl.float32)
    at = ((b * seqlen + token + offs_i[:, None]) * NHEADS + h) * HEADDIM + offs_p[None, :]
    if y is not None:
        tl.store(y + at, acc.to(DTYPE), mask=in_ip)
    if z is not None:
        z_i = tl.load(z + b * z_strides[0] + (token + offs_i[:, None]) * z_strides[1] + h * z_strides[2]
                      + offs_p[None, :] * z_strides[3], mask=in_ip, other=0.0).to(tl.float32)
        acc *= z_i * sigmoid(z_i)
    tl.store(out + at, acc.to(DTYPE), mask=in_ip)


def chunk_scan(i: SSDInputs, CB, dt, dA_cumsum, prev_states, options: Options,
               save: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y."""
    out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    y = torch.empty_like(out) if save and i.z is not None else None
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.headdim, config["BLOCK_P"])
    launch(
        chunk_scan_kernel, tiles * i.nheads * i.nchunks * i.batch,
        CB, i.x, i.x.stride(), i.z, strides(i.z), i.C, i.C.stride(), i.D, per_channel_strides(i.D), dt, dA_cumsum, i.seq_idx,
        prev_states, out, y, i.seqlen, i.nchunks, i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size, options.precision,
        **config.launch)
    return out, y
