"""block_scan, equations (9), (10) and (5): a block of rows of a chunk against every block of columns before it.

Reads x, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; CB (batch, nchunks, ngroups,
chunk_size, chunk_size), or None to compute it in the tile; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; prev_states
(batch, nchunks, nheads, headdim, dstate). Writes out (batch, seqlen, nheads, headdim) in the dtype of x and, with z, y, the
output before the gate.
"""

import torch
import triton
import triton.language as tl

from ssd.kernels.arguments import cdiv, strides
from ssd.kernels.device import causal, document_before, sigmoid, unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .walk import decay, exponent, load_skip, load_tokens, state_tile

CONFIGS = ConfigSpace(
    "block_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 256, 4, 2), (64, 64, 64, 256, 4, 3), (128, 64, 64, 256, 8, 2), (64, 64, 32, 256, 4, 3)),
    staged=(("BLOCK_K", "BLOCK_N"), ("BLOCK_K", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_N", "BLOCK_P")),
    whole_dstate=True,
)


@triton.jit
def block_scan_kernel(x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt, dA_cumsum, seq_idx,
                      prev_states, out, y, seqlen, nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr,
                      HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, CAUSAL_BLOCKS: tl.constexpr,
                      EXP2: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_P: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    tile, h, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_P, NHEADS, nchunks)
    g = h // (NHEADS // NGROUPS)
    token = c.to(tl.int32) * CHUNK
    rows, first = tl.minimum(CHUNK, seqlen - token), tile // NTILES_P * BLOCK_M
    if first >= rows:
        return
    offs_m, offs_k, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    offs_i, offs_p = first + offs_m, tile % NTILES_P * BLOCK_P + tl.arange(0, BLOCK_P)
    x += b * x_strides[0] + h * x_strides[2]
    B += b * B_strides[0] + g * B_strides[2]
    C += b * C_strides[0] + g * C_strides[2]
    per_head = ((b * NHEADS + h) * nchunks + c) * CHUNK
    dt += per_head
    dA_cumsum += per_head
    if CB is not None:
        CB += ((b * nchunks + c) * NGROUPS + g) * CHUNK * CHUNK
    before = 0
    if seq_idx is not None:
        before = document_before(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token

    C_i = load_tokens(C, C_strides, token + first, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
    prev_states += ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    state = tl.load(prev_states + at, mask=inside, other=0.0).to(DTYPE)
    A_i = exponent(tl.load(dA_cumsum + offs_i), EXP2)
    from_start = decay(A_i, EXP2)
    if seq_idx is not None:
        from_start = tl.where(tl.load(seq_idx + offs_i, mask=offs_i < rows, other=-1) == before, from_start, 0.0)
    acc = tl.dot(C_i, state, input_precision=PRECISION) * from_start[:, None]

    for start in range(0, tl.minimum(first + BLOCK_M, rows) if CAUSAL_BLOCKS else rows, BLOCK_K):
        j = start + offs_k
        x_j = load_tokens(x, x_strides, token + start, offs_k, offs_p, seqlen, HEADDIM)
        if CB is None:
            B_j = load_tokens(B, B_strides, token + start, offs_k, offs_n, seqlen, DSTATE).to(DTYPE)
            CB_ij = tl.dot(C_i, tl.trans(B_j), input_precision=PRECISION)
        else:
            CB_ij = tl.load(CB + offs_i[:, None] * CHUNK + j[None, :]).to(tl.float32)
        weights = CB_ij * decay(A_i[:, None] - exponent(tl.load(dA_cumsum + j), EXP2)[None, :], EXP2) * tl.load(dt + j)[None, :]
        # selected, not multiplied by 0: above the diagonal CB may never have been written
        weights = tl.where(causal(offs_i, j, seq_idx, rows, False), weights, 0.0)
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=PRECISION)

    inside = (offs_i < rows)[:, None] & (offs_p < HEADDIM)[None, :]
    if D is not None:
        skip = load_skip(D, D_strides, h, offs_p, HEADDIM)
        acc += skip * load_tokens(x, x_strides, token + first, offs_m, offs_p, seqlen, HEADDIM).to(tl.float32)
    at = ((b * seqlen + token + offs_i[:, None]) * NHEADS + h) * HEADDIM + offs_p[None, :]
    if y is not None:
        tl.store(y + at, acc.to(DTYPE), mask=inside)
    if z is not None:
        z += b * z_strides[0] + h * z_strides[2]
        z_i = load_tokens(z, z_strides, token + first, offs_m, offs_p, seqlen, HEADDIM).to(tl.float32)
        acc *= z_i * sigmoid(z_i)
    tl.store(out + at, acc.to(DTYPE), mask=inside)


def block_scan(i: SSDInputs, CB, dt, dA_cumsum, prev_states, options: Options,
               save: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y."""
    out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    y = torch.empty_like(out) if save and i.z is not None else None
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.headdim, config["BLOCK_P"])
    launch(
        block_scan_kernel, tiles * i.nheads * i.nchunks * i.batch,
        i.x, i.x.stride(), i.z, strides(i.z), i.B, i.B.stride(), i.C, i.C.stride(), CB, i.D, strides(i.D), dt,
        dA_cumsum, i.seq_idx, prev_states, out, y, i.seqlen, i.nchunks, i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size,
        options.causal_blocks, options.exp2, options.precision, **config.launch)
    return out, y
