"""group_dC, equations (30), (31): dC of a sub-chunk, dCB, and what each head's decay gets from the outputs.

Reads x, dy (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads,
nblocks, BLOCK_M) fp32; prev_states (batch, nblocks, nheads, headdim, dstate), the state before each sub-chunk. Writes dC, any
strides, in the dtype of C, or as parts of the splits, (splits, batch, seqlen, ngroups, dstate) fp32; dCB (batch, nblocks,
ngroups, splits, BLOCK_M, BLOCK_M) in the dtype of x, i before j; and net = r + row - col (batch, nheads, nblocks, BLOCK_M)
fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.device import split_heads, unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace, head_splits
from ssd.types import Options, SSDInputs

from .group import load_states, parts_of, store_tokens, summed
from .walk import decay, decays, load_tokens, visible

CONFIGS = ConfigSpace(
    "group_dC",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 8, 3), (64, 64, 256, 8, 2), (64, 64, 256, 4, 2), (64, 32, 256, 8, 3)),
    staged=(("BLOCK_P", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_M")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def head_products(x, x_strides, dy, dy_strides, prev_states, token, offs_m, offs_n, seqlen, HEADDIM: tl.constexpr,
                  DSTATE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr):
    """dy_i . x_j [M, M] and dy_i H [M, N] of one head, at which the pointers are; both fp32."""
    dy_x = tl.zeros([offs_m.shape[0], offs_m.shape[0]], tl.float32)
    dy_H = tl.zeros([offs_m.shape[0], offs_n.shape[0]], tl.float32)
    for first in range(0, HEADDIM, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        dy_i = load_tokens(dy, dy_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        x_j = load_tokens(x, x_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        H = load_states(prev_states, offs_p, offs_n, HEADDIM, DSTATE)
        dy_x = tl.dot(dy_i, tl.trans(x_j), dy_x, input_precision=PRECISION)
        dy_H = tl.dot(dy_i, H.to(dy_i.dtype), dy_H, input_precision=PRECISION)
    return dy_x, dy_H


@triton.jit
def group_dC_kernel(x, x_strides, dy, dy_strides, B, B_strides, C, C_strides, dt, dA_cumsum, seq_idx, prev_states, dC,
                    dC_strides, part_stride, dCB, net, seqlen, nblocks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr,
                    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, SPLITS: tl.constexpr, EXP2: tl.constexpr,
                    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    HEADS: tl.constexpr = NHEADS // NGROUPS
    _, slot, c, b = unpack_program(1, NGROUPS * SPLITS, nblocks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    token = c.to(tl.int32) * BLOCK_M
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x += b * x_strides[0]
    dy += b * dy_strides[0]
    B += b * B_strides[0] + g * B_strides[2]
    C += b * C_strides[0] + g * C_strides[2]
    dC += split * part_stride + b * dC_strides[0] + g * dC_strides[2]
    dCB += ((b * nblocks + c) * NGROUPS * SPLITS + slot) * BLOCK_M * BLOCK_M
    prev_states += (b * nblocks + c) * NHEADS * HEADDIM * DSTATE
    if seq_idx is not None:
        seq_idx += b * seqlen

    C_i = load_tokens(C, C_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    B_j = load_tokens(B, B_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    below = visible(seq_idx, token, offs_m, seqlen, False) & (offs_m[:, None] != offs_m[None, :])
    CB_below = tl.where(below, tl.dot(C_i, tl.trans(B_j), input_precision=PRECISION), 0.0)
    dC_i = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dCB_ij = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for k in tl.range(0, count):
        h = g * HEADS + head + k
        per_head = (b * NHEADS + h) * nblocks * BLOCK_M
        A_i, from_start, _to_end, _carried = decays(dA_cumsum + per_head, seq_idx, token, offs_m, seqlen, BLOCK_M, EXP2)
        dt_j = tl.load(dt + per_head + token + offs_m)
        dy_x, dy_H = head_products(x + h * x_strides[2], x_strides, dy + h * dy_strides[2], dy_strides,
                                   prev_states + h * HEADDIM * DSTATE, token, offs_m, offs_n, seqlen, HEADDIM, DSTATE,
                                   PRECISION, BLOCK_P)
        K_ij = dy_x * decay(A_i[:, None] - A_i[None, :], EXP2) * dt_j[None, :]
        dCB_ij += K_ij
        dC_i += dy_H * from_start[:, None]
        r_i = from_start * tl.sum(dy_H * C_i.to(tl.float32), 1)
        pairs = K_ij * CB_below
        tl.store(net + per_head + token + offs_m, r_i + (tl.sum(pairs, 1) - tl.sum(pairs, 0)))

    dCB_ij = tl.where(visible(seq_idx, token, offs_m, seqlen, False), dCB_ij, 0.0).to(DTYPE)
    tl.store(dCB + offs_m[:, None] * BLOCK_M + offs_m[None, :], dCB_ij)
    # again, so as not to hold it through the loop
    B_j = load_tokens(B, B_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    dC_i = tl.dot(dCB_ij, B_j, dC_i, input_precision=PRECISION)
    store_tokens(dC, dC_strides, token, offs_m, offs_n, seqlen, dC_i, DSTATE)


def group_dC(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, prev_states: Tensor, options: Options,
             into: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dC, dCB of each split, and net."""
    nblocks, span = dA_cumsum.shape[2:]
    programs = i.ngroups * nblocks * i.batch
    splits = head_splits(i, programs)
    parts = parts_of(i.C, into, splits)
    shape = (i.batch, nblocks, i.ngroups, splits, span, span)
    dCB, net = torch.empty(shape, device=i.x.device, dtype=i.x.dtype), torch.empty_like(dt)
    launch(
        group_dC_kernel, programs * splits,
        i.x, i.x.stride(), dy, dy.stride(), i.B, i.B.stride(), i.C, i.C.stride(), dt, dA_cumsum, i.seq_idx, prev_states,
        parts, parts.stride()[1:], parts.stride(0), dCB, net, i.seqlen, nblocks, i.nheads, i.ngroups, i.headdim, i.dstate,
        splits, options.exp2, options.precision, **(CONFIGS.pick(i).launch | {"BLOCK_M": span}))
    return summed(parts, i.C, into), dCB, net
