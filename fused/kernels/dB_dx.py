"""dB_dx, equations (18), (19), (21), (32): chunk_scan_chunk_state_dx, chunk_state_dB and bmm_bwd's dB of a block in one.

    u_j = sum_{i>=j} m(j, i) CB_ij exp(A_i - A_j) dy_i,  v_j = m(j, last) exp(A_last - A_j) G B_j
    dx_j = dt_j (u_j + v_j) + D dy_j,  q_j = dt_j (v_j . x_j),  dD = sum_j dy_j x_j
    dB_j = sum_heads m(j, last) exp(A_last - A_j) dt_j x_j G + sum_i dCB_ij C_i

A program takes a block of BLOCK_M tokens and loops over heads of a group, in order. B, C and their products are the group's,
loaded once; dB stays in registers.

Reads x, dy (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum, A, (batch,
nheads, nblocks, BLOCK_M) fp32; dstates, G, (batch, nblocks, nheads, headdim, dstate), the gradient of the state after each
block; dCB as dC_dCB leaves it; D (nheads,) or (nheads, headdim). Writes dx, any strides; (u + v) . x and q (batch, nheads,
nblocks, BLOCK_M) fp32; dB, any strides, in the dtype of B, or as parts of the splits, (splits, batch, seqlen, ngroups, dstate)
fp32; and dD as partial sums over blocks, (batch * nblocks, nheads, headdim or 1) fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides, output, strides
from ssd.kernels.device import decay, load_skip, load_state, product, split_heads, unpack_program
from ssd.kernels.sum_parts import sum_first
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .head_sums import add_splits, allocate_splits
from .segment import block_decays, get_form, load_block, store_block, visible

CONFIGS = ConfigSpace(
    "dB_dx",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 8, 2), (64, 64, 256, 8, 3), (64, 32, 256, 8, 2)),
    staged=(("BLOCK_P", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_M")),
    whole_dstate=True, state_in_registers=True,
)


class Head(NamedTuple):
    """Pointers at one head, in a kernel; D points at all heads, and is None where there is none, as is dD_tiles."""

    x: object
    dy: object
    D: object
    dstates: object
    dx: object
    dD_tiles: object


@triton.jit
def skip_grads(dD_tiles, dy_j, x_j, offs_p, HEADDIM: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """(19): sum_j dy_j x_j of a tile of headdim, stored where D has channels; returns its sum over them."""
    by_channel = tl.sum(product(dy_j, x_j), 0)
    if PER_CHANNEL:
        tl.store(dD_tiles + offs_p, by_channel, mask=offs_p < HEADDIM)
    return tl.sum(by_channel, 0)


@triton.jit
def head_grads(dB_j, B_j, pairs, to_end, dt_j, head, strides, h, token, offs_m, offs_n, seqlen, FORM: tl.constexpr,
               BLOCK_P: tl.constexpr):
    """One head: writes dx and dD, adds to dB_j [M, N]; returns it, (u + v) . x and v . x [M].

    pairs: the weights of dy_i in u_j, [j, i] in the dtype of x.
    """
    x, dy, D, dstates, dx, dD_tiles = head
    u_v_x = tl.zeros([offs_m.shape[0]], tl.float32)
    v_x = tl.zeros([offs_m.shape[0]], tl.float32)
    dD = 0.0
    for first in range(0, FORM.headdim, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        G = load_state(dstates, offs_p, offs_n, FORM)
        dy_j = load_block(dy, strides.dy, token, offs_m, offs_p, seqlen, FORM.headdim)
        x_j = load_block(x, strides.x, token, offs_m, offs_p, seqlen, FORM.headdim).to(tl.float32)
        u_v = tl.dot(B_j, tl.trans(G), input_precision=FORM.precision) * to_end[:, None]  # [M, N] @ [N, P]
        v_x += tl.sum(u_v * x_j, 1)
        weights = pairs
        if FORM.headdim > BLOCK_P and pairs.dtype.primitive_bitwidth == 16:
            # ptxas 12.8 gives away the registers of a product's left operand that a loop does not write: write them
            nothing = ((token + first) >> 31).to(tl.int16)
            weights = (pairs.to(tl.int16, bitcast=True) | nothing).to(pairs.dtype, bitcast=True)
        u_v = tl.dot(weights, dy_j, u_v, input_precision=FORM.precision)  # [M, M] @ [M, P]
        u_v_x += tl.sum(u_v * x_j, 1)
        dx_j = u_v * dt_j[:, None]
        if D is not None:
            dy_f = dy_j.to(tl.float32)
            dx_j += load_skip(D, strides.D, h, offs_p, FORM.headdim) * dy_f
            dD += skip_grads(dD_tiles, dy_f, x_j, offs_p, FORM.headdim, len(strides.D) == 2)
        store_block(dx, strides.dx, token, offs_m, offs_p, seqlen, dx_j, FORM.headdim)
        weighted = (x_j * (dt_j * to_end)[:, None]).to(G.dtype)
        dB_j = tl.dot(weighted, G, dB_j, input_precision=FORM.precision)  # [M, P] @ [P, N]
    if D is not None and len(strides.D) == 1:
        tl.store(dD_tiles, dD)
    return dB_j, u_v_x, v_x


@triton.jit(do_not_specialize=COUNTS)
def dB_dx_kernel(x, dy, B, C, D, dt, dA_cumsum, seq_idx, dstates, dCB, dx, dB_parts, u_v_x, q, dD_tiles, strides, parts_strides,
                 seqlen, nblocks, FORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                 BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    HEADS: tl.constexpr = FORM.nheads // FORM.ngroups
    D_WIDTH: tl.constexpr = FORM.headdim if D is not None and len(strides.D) == 2 else 1
    _, slot, c, b = unpack_program(1, FORM.ngroups * SPLITS, nblocks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    token = c.to(tl.int32) * BLOCK_M
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x += b * strides.x[0]
    dy += b * strides.dy[0]
    dx += b * strides.dx[0]
    B += b * strides.B[0] + g * strides.B[2]
    C += b * strides.C[0] + g * strides.C[2]
    part_strides = parts_strides[1:]
    dB_parts += split * parts_strides[0] + b * part_strides[0] + g * part_strides[2]
    dCB += ((b * nblocks + c) * FORM.ngroups * SPLITS + slot) * BLOCK_M * BLOCK_M
    dstates += (b * nblocks + c) * FORM.nheads * FORM.headdim * FORM.dstate
    if D is not None:
        dD_tiles += (b * nblocks + c) * FORM.nheads * D_WIDTH
    if seq_idx is not None:
        seq_idx += b * seqlen

    B_j = load_block(B, strides.B, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    C_i = load_block(C, strides.C, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    seen = visible(seq_idx, token, offs_m, seqlen, True)
    BC = tl.where(seen, tl.dot(B_j, tl.trans(C_i), input_precision=FORM.precision), 0.0)
    dCB_ij = tl.load(dCB + offs_m[:, None] * BLOCK_M + offs_m[None, :])
    dB_j = tl.dot(tl.trans(dCB_ij), C_i, input_precision=FORM.precision)  # [M, M] @ [M, N]
    for k in tl.range(0, count):
        h = g * HEADS + head + k
        per_head = (b * FORM.nheads + h) * nblocks * BLOCK_M
        A_j, _from_start, to_end, _carried = block_decays(dA_cumsum + per_head, seq_idx, token, offs_m, seqlen, BLOCK_M, FORM)
        at = per_head + token + offs_m
        dt_j = tl.load(dt + at)
        pairs = (BC * decay(A_j[None, :] - A_j[:, None], FORM.exp2)).to(DTYPE)
        of_head = Head(x + h * strides.x[2], dy + h * strides.dy[2], D, dstates + h * FORM.headdim * FORM.dstate,
                       dx + h * strides.dx[2], None if D is None else dD_tiles + h * D_WIDTH)
        dB_j, u_v_x_j, v_x_j = head_grads(dB_j, B_j, pairs, to_end, dt_j, of_head, strides, h, token, offs_m, offs_n, seqlen,
                                          FORM, BLOCK_P)
        tl.store(u_v_x + at, u_v_x_j)
        tl.store(q + at, dt_j * v_x_j)
    store_block(dB_parts, part_strides, token, offs_m, offs_n, seqlen, dB_j, FORM.dstate)


def dB_dx(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, dstates: Tensor, dCB: Tensor, options: Options,
          into_dx: Tensor | None, into_dB: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Returns dx, dB, dD (None without D), summed, (u + v) . x and q."""
    nblocks, block = dA_cumsum.shape[2:]
    splits, dx = dCB.shape[3], output(i.x, into_dx)
    parts, dD_tiles = allocate_splits(i.B, into_dB, splits), None
    if i.D is not None:
        dD_tiles = torch.empty(i.batch * nblocks, *i.D.shape, device=dt.device, dtype=torch.float32)
    u_v_x, q = torch.empty_like(dt), torch.empty_like(dt)
    launch(
        dB_dx_kernel, i.ngroups * splits * nblocks * i.batch,
        i.x, dy, i.B, i.C, i.D, dt, dA_cumsum, i.seq_idx, dstates, dCB, dx, parts, u_v_x, q, dD_tiles,
        Strides(x=i.x.stride(), B=i.B.stride(), C=i.C.stride(), D=strides(i.D), dy=dy.stride(), dx=dx.stride()), parts.stride(),
        i.seqlen, nblocks, get_form(i, options), splits, **CONFIGS.pick(i).launch | {"BLOCK_M": block})
    dD = None if dD_tiles is None else sum_first(dD_tiles, output(dD_tiles[0]))
    return dx, add_splits(parts, i.B, into_dB), dD, u_v_x, q
