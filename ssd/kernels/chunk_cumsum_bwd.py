"""chunk_cumsum_bwd, equations (20) to (25): the gradients of the step and of A, from the sums the other kernels left.

Reads dt_raw (batch, seqlen, nheads), any strides; (u + v) . x, q and row (batch, nheads, nchunks, chunk_size); r and col, the
same with partial sums in front; s (batch, nheads, nchunks, ntiles); all fp32; and dy . x, shaped as q, of which dD is the sum,
or None. Writes ddt (batch, seqlen, nheads), any strides, and dA, ddt_bias and dD, (nheads,) fp32. Each program leaves its
chunk's part of these sums; the last to arrive of those of the same heads adds the parts up, in the same order whichever it is.
They count in arrivals (nheads,) int32, of a tile of heads at its number: 0 on exit, and on entry, without which no sum is
written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.tuning import ConfigSpace
from ..types import SSDInputs
from .arguments import COUNTS, cdiv, contiguous, output
from .chunk_cumsum import Form, find_tokens, step
from .device import product, sigmoid, unpack_program
from .document_blocks import FIELDS

_ELEMENTS = tl.constexpr(1024)  # of the parts of each sum, which the last program adds up at a time

CONFIGS = ConfigSpace(
    "chunk_cumsum_bwd",
    axes={"BLOCK_H": None},
    entries=((8, 4, 1), (4, 4, 1), (16, 4, 1), (8, 8, 1)),
)


@triton.jit
def add_chunks(parts, sums, nparts, offs_h, NHEADS: tl.constexpr, NSUMS: tl.constexpr, BLOCK_H: tl.constexpr):
    """The sums over chunks of these heads, of parts (NSUMS, nparts, NHEADS)"""
    NSUMS_PADDED: tl.constexpr = triton.next_power_of_2(NSUMS)
    ROWS: tl.constexpr = _ELEMENTS // BLOCK_H
    n, k, h = tl.arange(0, NSUMS_PADDED)[:, None, None], tl.arange(0, ROWS)[None, :, None], offs_h[None, None, :]
    total = tl.zeros((NSUMS_PADDED, ROWS, BLOCK_H), tl.float32)
    for first in range(0, nparts, ROWS):
        at = (n * nparts + first + k) * NHEADS + h
        total += tl.load(parts + at, mask=(n < NSUMS) & (first + k < nparts) & (h < NHEADS), other=0.0)
    n = tl.arange(0, NSUMS_PADDED)[:, None]
    tl.store(sums + n * NHEADS + offs_h[None, :], tl.sum(total, 1), mask=(n < NSUMS) & (offs_h < NHEADS)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def chunk_cumsum_bwd_kernel(dt, dt_strides, A, dt_bias, blocks, u_v_x, r_tiles, q, s_tiles, row, col_tiles, dy_x, ddt,
                            ddt_strides, parts, sums, arrivals, seqlen, nchunks, tile_stride, dt_limit, FORM: tl.constexpr,
                            R_TILES: tl.constexpr, S_TILES: tl.constexpr, COL_TILES: tl.constexpr, BLOCK_H: tl.constexpr):
    NHEADS: tl.constexpr = FORM.nheads
    CHUNK: tl.constexpr = FORM.chunk
    TILES: tl.constexpr = (NHEADS + BLOCK_H - 1) // BLOCK_H
    NSUMS: tl.constexpr = 1 + (dt_bias is not None) + (dy_x is not None)
    tile, _, c, b = unpack_program(TILES, 1, nchunks)
    offs_h, offs_q = tile * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, CHUNK)
    in_h = offs_h < NHEADS
    raw, unclamped, clamped, inside = step(dt, dt_strides, dt_bias, blocks, b, c, offs_h, seqlen, dt_limit, FORM)
    rate = tl.load(A + offs_h, mask=in_h, other=0.0).to(tl.float32)[:, None]
    chunk = (b * NHEADS + offs_h.to(tl.int64)[:, None]) * nchunks + c
    at = chunk * CHUNK + offs_q[None, :]

    tile_stride = tile_stride.to(tl.int64)
    from_here_on = tl.load(row + at, mask=inside, other=0.0)
    for n in tl.static_range(R_TILES):
        from_here_on += tl.load(r_tiles + n * tile_stride + at, mask=inside, other=0.0)
    for n in tl.static_range(COL_TILES):
        written = offs_q < (n + 1) * (CHUNK // COL_TILES)
        from_here_on -= tl.load(col_tiles + n * tile_stride + at, mask=inside & written[None, :], other=0.0)
    q_j = tl.load(q + at, mask=inside, other=0.0)
    s = tl.zeros([BLOCK_H], tl.float32)
    for n in tl.static_range(S_TILES):
        s += tl.load(s_tiles + ((b * NHEADS + offs_h.to(tl.int64)) * nchunks + c) * S_TILES + n, mask=in_h, other=0.0)
    if blocks is not None:  # of blocks that are none, nobody has written s
        s = tl.where(tl.load(blocks + FIELDS * c + 1) > 0, s, 0.0)
    da = tl.cumsum(from_here_on, axis=1, reverse=True) + (tl.cumsum(q_j, axis=1) - q_j) + s[:, None]

    grad = tl.load(u_v_x + at, mask=inside, other=0.0) + da * rate
    if FORM.softplus:
        grad *= sigmoid(raw)
    grad = tl.where(inside & (unclamped >= dt_limit[0]) & (unclamped <= dt_limit[1]), grad, 0.0)
    at = find_tokens(blocks, c, CHUNK)[None, :] * ddt_strides[1] + offs_h.to(tl.int64)[:, None] * ddt_strides[2]
    tl.store(ddt + b * ddt_strides[0] + at, grad.to(ddt.dtype.element_ty), mask=inside)

    nparts = tl.cast(tl.num_programs(0) // TILES, tl.int64)
    part = parts + (b * nchunks + c) * NHEADS + offs_h
    tl.store(part, tl.sum(product(da, clamped), 1), mask=in_h)
    if dt_bias is not None:
        part += nparts * NHEADS
        tl.store(part, tl.sum(grad, 1), mask=in_h)
    if dy_x is not None:
        part += nparts * NHEADS
        at = chunk * CHUNK + offs_q[None, :]
        tl.store(part, tl.sum(tl.load(dy_x + at, mask=inside, other=0.0), 1), mask=in_h)

    tl.debug_barrier()  # all of the block has stored before one of its threads says so
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == nparts - 1:
        add_chunks(parts, sums, nparts, offs_h, NHEADS, NSUMS, BLOCK_H)
        tl.store(arrivals + tile, 0)  # whoever launches it again, to time it say, finds it as it was


def chunk_cumsum_bwd(i: SSDInputs, u_v_x: Tensor, r_tiles: Tensor, q: Tensor, s_tiles: Tensor, row: Tensor, col_tiles: Tensor,
                     arrivals: Tensor, into: Tensor | None, dy_x: Tensor | None = None,
                     blocks: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Returns ddt, dA, ddt_bias (None without dt_bias) and dD (None without dy_x). arrivals: as chunk_cumsum leaves them."""
    ddt = output(i.dt, into)
    wanted = (True, i.dt_bias is not None, dy_x is not None)
    nchunks = row.shape[2]
    parts = torch.empty(sum(wanted), i.batch * nchunks, i.nheads, device=i.x.device, dtype=torch.float32)
    sums = parts.new_empty(sum(wanted), i.nheads)
    config = CONFIGS.pick(i)
    launch(
        chunk_cumsum_bwd_kernel, cdiv(i.nheads, config["BLOCK_H"]) * nchunks * i.batch,
        i.dt, i.dt.stride(), i.A.contiguous(), contiguous(i.dt_bias), blocks, u_v_x, r_tiles, q, s_tiles, row, col_tiles, dy_x,
        ddt, ddt.stride(), parts, sums, arrivals, i.seqlen, nchunks, row.numel(), i.dt_limit,
        Form(i.nheads, i.chunk_size, i.dt_softplus), r_tiles.shape[0], s_tiles.shape[-1], col_tiles.shape[0], **config.launch)
    each = iter(sums)
    return ddt, *[next(each) if want else None for want in wanted]
