"""dC_dCB, equations (30), (31): chunk_scan_dC, chunk_scan_dCB, ddA_cumsum and bmm_bwd's dC of a block in one.

    dC_i = sum_heads m(prev, i) exp(A_i) e_i + sum_j dCB_ij B_j,  e_i = dy_i H
    dCB_ij = sum_heads K_ij,  K_ij = m(j, i) exp(A_i - A_j) dt_j (dy_i . x_j)
    net_i = r_i + row_i - col_i,  r_i = m(prev, i) exp(A_i) (e_i . C_i),  row and col the sums of K_ij CB_ij below the diagonal

A program takes a block of BLOCK_M tokens and loops over heads of a group, in order. B, C and their products are the group's,
loaded once; sums over the heads stay in registers.

Reads x, dy (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum, A, (batch,
nheads, nblocks, BLOCK_M) fp32; prev_states, H, (batch, nblocks, nheads, headdim, dstate), the state before each block. Writes
dC, any strides, in the dtype of C, or as parts of the splits, (splits, batch, seqlen, ngroups, dstate) fp32; dCB (batch,
nblocks, ngroups, splits, BLOCK_M, BLOCK_M) in the dtype of x, i before j; and net (batch, nheads, nblocks, BLOCK_M) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides
from ssd.kernels.device import decay, load_state, split_heads, unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace, head_splits
from ssd.types import Options, SSDInputs

from .head_sums import add_splits, allocate_splits
from .segment import block_decays, get_form, load_block, store_block, visible

CONFIGS = ConfigSpace(
    "dC_dCB",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 8, 3), (64, 64, 256, 8, 2), (64, 64, 256, 4, 2), (64, 32, 256, 8, 3)),
    staged=(("BLOCK_P", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_M")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def head_products(x, dy, strides, prev_states, token, offs_m, offs_n, seqlen, FORM: tl.constexpr, BLOCK_P: tl.constexpr):
    """dy_i . x_j [M, M] and e_i [M, N] of one head, at which the pointers are; both fp32."""
    dy_x = tl.zeros([offs_m.shape[0], offs_m.shape[0]], tl.float32)
    e_i = tl.zeros([offs_m.shape[0], offs_n.shape[0]], tl.float32)
    for first in range(0, FORM.headdim, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        dy_i = load_block(dy, strides.dy, token, offs_m, offs_p, seqlen, FORM.headdim)
        x_j = load_block(x, strides.x, token, offs_m, offs_p, seqlen, FORM.headdim)
        H = load_state(prev_states, offs_p, offs_n, FORM)
        dy_x = tl.dot(dy_i, tl.trans(x_j), dy_x, input_precision=FORM.precision)  # [M, P] @ [P, M]
        e_i = tl.dot(dy_i, H.to(dy_i.dtype), e_i, input_precision=FORM.precision)  # [M, P] @ [P, N]
    return dy_x, e_i


@triton.jit(do_not_specialize=COUNTS)
def dC_dCB_kernel(x, dy, B, C, dt, dA_cumsum, seq_idx, prev_states, dC_parts, dCB, net, strides, parts_strides, seqlen, nblocks,
                  FORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                  BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    HEADS: tl.constexpr = FORM.nheads // FORM.ngroups
    _, slot, c, b = unpack_program(1, FORM.ngroups * SPLITS, nblocks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    token = c.to(tl.int32) * BLOCK_M
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x += b * strides.x[0]
    dy += b * strides.dy[0]
    B += b * strides.B[0] + g * strides.B[2]
    C += b * strides.C[0] + g * strides.C[2]
    part_strides = parts_strides[1:]
    dC_parts += split * parts_strides[0] + b * part_strides[0] + g * part_strides[2]
    dCB += ((b * nblocks + c) * FORM.ngroups * SPLITS + slot) * BLOCK_M * BLOCK_M
    prev_states += (b * nblocks + c) * FORM.nheads * FORM.headdim * FORM.dstate
    if seq_idx is not None:
        seq_idx += b * seqlen

    C_i = load_block(C, strides.C, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    B_j = load_block(B, strides.B, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    below = visible(seq_idx, token, offs_m, seqlen, False) & (offs_m[:, None] != offs_m[None, :])
    CB_below = tl.where(below, tl.dot(C_i, tl.trans(B_j), input_precision=FORM.precision), 0.0)  # [M, N] @ [N, M]
    dC_i = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dCB_ij = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for k in tl.range(0, count):
        h = g * HEADS + head + k
        per_head = (b * FORM.nheads + h) * nblocks * BLOCK_M
        A_i, from_start, _to_end, _carried = block_decays(dA_cumsum + per_head, seq_idx, token, offs_m, seqlen, BLOCK_M, FORM)
        dt_j = tl.load(dt + per_head + token + offs_m)
        dy_x, e_i = head_products(x + h * strides.x[2], dy + h * strides.dy[2], strides,
                                  prev_states + h * FORM.headdim * FORM.dstate, token, offs_m, offs_n, seqlen, FORM, BLOCK_P)
        K_ij = dy_x * decay(A_i[:, None] - A_i[None, :], FORM.exp2) * dt_j[None, :]
        dCB_ij += K_ij
        dC_i += e_i * from_start[:, None]
        r_i = from_start * tl.sum(e_i * C_i.to(tl.float32), 1)
        pairs = K_ij * CB_below
        tl.store(net + per_head + token + offs_m, r_i + (tl.sum(pairs, 1) - tl.sum(pairs, 0)))

    dCB_ij = tl.where(visible(seq_idx, token, offs_m, seqlen, False), dCB_ij, 0.0).to(DTYPE)
    tl.store(dCB + offs_m[:, None] * BLOCK_M + offs_m[None, :], dCB_ij)
    # again, so as not to hold it through the loop
    B_j = load_block(B, strides.B, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    dC_i = tl.dot(dCB_ij, B_j, dC_i, input_precision=FORM.precision)  # [M, M] @ [M, N]
    store_block(dC_parts, part_strides, token, offs_m, offs_n, seqlen, dC_i, FORM.dstate)


def dC_dCB(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, prev_states: Tensor, options: Options,
           into: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dC, dCB of each split, and net."""
    nblocks, block = dA_cumsum.shape[2:]
    programs = i.ngroups * nblocks * i.batch
    splits = head_splits(i, programs)
    parts = allocate_splits(i.C, into, splits)
    shape = (i.batch, nblocks, i.ngroups, splits, block, block)
    dCB, net = torch.empty(shape, device=i.x.device, dtype=i.x.dtype), torch.empty_like(dt)
    launch(
        dC_dCB_kernel, programs * splits,
        i.x, dy, i.B, i.C, dt, dA_cumsum, i.seq_idx, prev_states, parts, dCB, net,
        Strides(x=i.x.stride(), B=i.B.stride(), C=i.C.stride(), dy=dy.stride()), parts.stride(), i.seqlen, nblocks,
        get_form(i, options), splits, **CONFIGS.pick(i).launch | {"BLOCK_M": block})
    return add_splits(parts, i.C, into), dCB, net
