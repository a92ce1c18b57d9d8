"""document_blocks: where the blocks of 64 tokens lie that documents are walked in, each of one document.

Reads cu_seqlens (ndocs + 1,) int32, whose values nobody has checked: they count as made to rise from 0 to seqlen. Writes
blocks (nblocks + 1, 6) int32, a row a block: the token that is 64 before its end, which may be below 0; how many of those 64
are its own, the last ones; the document that it begins, or -1; the document that it ends, or -1; the first and the last block
of its document. A document has a block for each 64 of its tokens, of which the first may be short. An empty one has a block
without tokens, at seqlen, so that every document is begun and ended once. The first number of the row behind all blocks is how
many there are. Rows in between begin with (seqlen, 0, -1, -1).

A short block comes first and has its tokens last. So A_last, the last of 64, is that of a token, and those before can be told
to have decayed: whatever lies there, its gradients reach no state.
"""

import torch
import triton
import triton.language as tl

from ..runtime.launch import launch
from ..types import SUB_CHUNK, SSDInputs
from .arguments import COUNTS, cdiv

FIELDS = tl.constexpr(6)
_ROWS, _DOCUMENTS = 64, 64


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=COUNTS)
def document_blocks_kernel(cu_seqlens, blocks, ndocs, seqlen, nblocks, TOKENS: tl.constexpr, ROWS: tl.constexpr,
                           DOCUMENTS: tl.constexpr):
    """Each program goes through all documents: those whose first block is at most v are those up to the one of block v."""
    v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    document, first = tl.zeros([ROWS], tl.int32) - 1, tl.zeros([ROWS], tl.int32)
    past, start, end = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    total, highest = 0, 0
    for k in range(0, ndocs, DOCUMENTS):
        d = k + tl.arange(0, DOCUMENTS)
        starts = tl.minimum(tl.maximum(tl.load(cu_seqlens + d, mask=(d > 0) & (d < ndocs), other=0), 0), seqlen)
        starts = tl.maximum(tl.associative_scan(starts, 0, _larger), highest)
        ends = tl.minimum(tl.maximum(tl.load(cu_seqlens + d + 1, mask=d + 1 < ndocs, other=0), 0), seqlen)
        ends = tl.maximum(tl.associative_scan(ends, 0, _larger), tl.maximum(highest, starts))
        ends = tl.where(d + 1 >= ndocs, seqlen, ends)
        size = tl.where(d < ndocs, tl.maximum((ends - starts + TOKENS - 1) // TOKENS, 1), 0)
        firsts = total + tl.cumsum(size, 0) - size
        before = (firsts[None, :] <= v[:, None]) & (d < ndocs)[None, :]
        document += tl.sum(before.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(before, firsts[None, :], 0), 1))
        start = tl.maximum(start, tl.max(tl.where(before, starts[None, :], 0), 1))
        past = tl.maximum(past, tl.max(tl.where(before, (firsts + size)[None, :], 0), 1))
        end = tl.maximum(end, tl.max(tl.where(before, ends[None, :], 0), 1))
        total += tl.sum(size, 0)
        highest = tl.maximum(highest, tl.max(tl.where(d < ndocs, starts, 0), 0))
    inside = v < total
    token = tl.where(inside & (end > start), end - (past - v) * TOKENS, seqlen)
    row = blocks + v * FIELDS
    tl.store(row, tl.where(v == nblocks, total, token), mask=v <= nblocks)
    tl.store(row + 1, tl.where(token < seqlen, token + TOKENS - tl.maximum(token, start), 0), mask=v <= nblocks)
    tl.store(row + 2, tl.where(inside & (v == first), document, -1), mask=v <= nblocks)
    tl.store(row + 3, tl.where(inside & (v == past - 1), document, -1), mask=v <= nblocks)
    tl.store(row + 4, first, mask=v <= nblocks)
    tl.store(row + 5, past - 1, mask=v <= nblocks)


def document_blocks(i: SSDInputs) -> torch.Tensor:
    """Returns blocks, as many as documents of the worst lengths need."""
    ndocs = i.cu_seqlens.shape[0] - 1
    nblocks = i.count_states(SUB_CHUNK)
    blocks = torch.empty(nblocks + 1, FIELDS.value, device=i.x.device, dtype=torch.int32)
    launch(document_blocks_kernel, cdiv(nblocks + 1, _ROWS), i.cu_seqlens, blocks, ndocs, i.seqlen, nblocks, SUB_CHUNK, _ROWS,
           _DOCUMENTS, num_warps=4)
    return blocks
