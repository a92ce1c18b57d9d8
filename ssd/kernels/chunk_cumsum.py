"""chunk_cumsum, equations (1), (2), (6): the step dt and the cumulative decay dA_cumsum.

Reads dt (batch, seqlen, nheads), any dtype and strides; and seq_idx (batch, seqlen), where documents are to be kept apart by
decay alone; or blocks, those of documents, in place of chunks. Writes dt and dA_cumsum, both (batch, nheads, nchunks,
chunk_size), fp32, contiguous; tokens past seqlen get dt = 0 and so keep the last cumulative sum. Sets arrivals (nheads,) int32,
which a later kernel counts in, to 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..runtime.dependent_launch import let_next_begin
from ..runtime.launch import launch
from ..runtime.tuning import ConfigSpace
from ..types import SSDInputs
from .arguments import COUNTS, cdiv, contiguous
from .device import softplus, unpack_program
from .document_blocks import FIELDS

# What dA_cumsum falls by at the first token of a document: 2^-184.7, and so 0 for every decay and step times decay that begins
# before it. Differences inside a document lose 1e-5 of a binary log in RMS, and four times that at most, for each document
# that began in the same chunk (docs/ssd.md).
_BOUNDARY = tl.constexpr(-128.0)

CONFIGS = ConfigSpace(
    "chunk_cumsum",
    axes={"BLOCK_H": None},
    entries=((16, 4, 1), (8, 4, 1), (32, 4, 1), (16, 8, 1)),
)


class Form(NamedTuple):
    """What a kernel is compiled for, as one constexpr argument."""

    nheads: int
    chunk: int
    softplus: bool


@triton.jit
def find_tokens(blocks, c, CHUNK: tl.constexpr):
    """The tokens [CHUNK] of chunk c, or of block c of documents."""
    if blocks is None:
        offs_q = c * CHUNK + tl.arange(0, CHUNK)
    else:
        offs_q = tl.load(blocks + FIELDS * c).to(tl.int64) + tl.arange(0, CHUNK)
    return offs_q


@triton.jit
def are_there(blocks, c, offs_q, seqlen, CHUNK: tl.constexpr):
    """Which of those tokens exist, or are the block's. offs_q: [1, CHUNK]."""
    if blocks is None:  # noqa: SIM108
        exist = offs_q < seqlen
    else:
        exist = (tl.arange(0, CHUNK) >= CHUNK - tl.load(blocks + FIELDS * c + 1))[None, :]
    return exist


@triton.jit
def step(dt, dt_strides, dt_bias, blocks, b, c, offs_h, seqlen, dt_limit, FORM: tl.constexpr):
    """dt with its bias, then after softplus, then after the clamp, each [BLOCK_H, CHUNK] fp32; and which elements exist."""
    offs_q = find_tokens(blocks, c, FORM.chunk)
    inside = (offs_h[:, None] < FORM.nheads) & are_there(blocks, c, offs_q[None, :], seqlen, FORM.chunk)
    at = offs_q[None, :] * dt_strides[1] + offs_h.to(tl.int64)[:, None] * dt_strides[2]
    raw = tl.load(dt + b * dt_strides[0] + at, mask=inside, other=0.0).to(tl.float32)
    if dt_bias is not None:
        raw += tl.load(dt_bias + offs_h, mask=offs_h < FORM.nheads, other=0.0).to(tl.float32)[:, None]
    unclamped = softplus(raw) if FORM.softplus else raw
    clamped = tl.clamp(unclamped, dt_limit[0], dt_limit[1], propagate_nan=tl.PropagateNan.ALL)
    return raw, unclamped, tl.where(inside, clamped, 0.0), inside


@triton.jit(do_not_specialize=COUNTS)
def chunk_cumsum_kernel(dt, dt_strides, A, dt_bias, seq_idx, blocks, dt_out, dA_cumsum, arrivals, seqlen, nchunks, dt_limit,
                        FORM: tl.constexpr, BLOCK_H: tl.constexpr, LETS_NEXT: tl.constexpr):
    let_next_begin(LETS_NEXT)
    CHUNK: tl.constexpr = FORM.chunk
    tile, _, c, b = unpack_program((FORM.nheads + BLOCK_H - 1) // BLOCK_H, 1, nchunks)
    offs_h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    _, _, clamped, _ = step(dt, dt_strides, dt_bias, blocks, b, c, offs_h, seqlen, dt_limit, FORM)
    in_h = offs_h < FORM.nheads
    rate = tl.load(A + offs_h, mask=in_h, other=0.0).to(tl.float32)
    dA = tl.cumsum(clamped * rate[:, None], axis=1)
    if seq_idx is not None:
        token = c * CHUNK + tl.arange(0, CHUNK)
        seq_idx += b * seqlen + token
        before = tl.load(seq_idx - 1, mask=(token > 0) & (token < seqlen), other=0)  # what initial_states reach is document 0
        here = tl.load(seq_idx, mask=token < seqlen, other=0)
        begun = tl.cumsum(((here != before) & (token < seqlen)).to(tl.int32), axis=0)
        dA += (begun * _BOUNDARY)[None, :]  # behind the sum, which would round at each of them
    offs = ((b * FORM.nheads + offs_h[:, None]) * nchunks + c) * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(dt_out + offs, clamped, mask=in_h[:, None])
    dA_cumsum += offs
    if blocks is not None:  # nothing of what lies before the tokens of a block is left, forwards (dt is 0) or backwards
        last = tl.arange(0, CHUNK) == CHUNK - 1  # through a block without tokens states pass as they are
        dA = tl.where(are_there(blocks, c, None, seqlen, CHUNK) | last[None, :], dA, _BOUNDARY)
    tl.store(dA_cumsum, dA, mask=in_h[:, None])
    if arrivals is not None:
        tl.store(arrivals + offs_h, 0, mask=in_h & (c == 0) & (b == 0))


def chunk_cumsum(i: SSDInputs, apart: bool = False, arrivals: torch.Tensor | None = None,
                 blocks: torch.Tensor | None = None, lets_next: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dt and dA_cumsum; apart: in which documents are, for kernels that do not read seq_idx. blocks: of documents, in
    place of chunks, each as long as a chunk. lets_next: the next launch may begin beside this one.
    """
    nchunks = i.nchunks if blocks is None else blocks.shape[0] - 1
    dt = torch.empty(i.batch, i.nheads, nchunks, i.chunk_size, device=i.x.device, dtype=torch.float32)
    dA_cumsum = torch.empty_like(dt)
    config = CONFIGS.pick(i)
    launch(
        chunk_cumsum_kernel, cdiv(i.nheads, config["BLOCK_H"]) * nchunks * i.batch,
        i.dt, i.dt.stride(), i.A.contiguous(), contiguous(i.dt_bias), i.seq_idx if apart else None, blocks, dt, dA_cumsum,
        arrivals, i.seqlen, nchunks, i.dt_limit, Form(i.nheads, i.chunk_size, i.dt_softplus), LETS_NEXT=lets_next,
        **config.launch)
    return dt, dA_cumsum
