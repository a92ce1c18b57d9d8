"""sum_parts: partial sums added up, in fixed order.

Reads parts (batch, K, N), contiguous; writes their sums over K, (batch, N), in any dtype: contiguous, or those of one batch in
rows that lie apart.
"""

from math import prod

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.tuning import next_power_of_2
from .arguments import cdiv

_ROWS, _COLUMNS, _ELEMENTS = 256, 16, 1024  # at most, at least, and of a tile unless its columns are the fewest


@triton.jit
def add_parts(parts, columns, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over K of these columns, of parts (K, N)."""
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, ROWS):
        at = (tl.cast(k, tl.int64) + rows)[:, None] * N + columns[None, :]
        total += tl.load(parts + at, mask=(k + rows < K)[:, None] & (columns < N)[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def sum_parts_kernel(parts, sums, row_stride, K, N, ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tiles = tl.cdiv(N, COLUMNS)
    batch = tl.cast(tl.program_id(0) // tiles, tl.int64)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = add_parts(parts + batch * K * N, columns, K, N, ROWS, COLUMNS)
    to = batch * N + columns
    if ROW is not None:
        to = columns // ROW * tl.cast(row_stride, tl.int64) + columns % ROW
    tl.store(sums + to, total.to(sums.dtype.element_ty), mask=columns < N)


def sum_parts(parts: Tensor, sums: Tensor) -> Tensor:
    """parts (batch, K, ...) into sums (batch, ...), both contiguous; returns sums."""
    return _launch(parts, sums, 0, None)


def _launch(parts: Tensor, sums: Tensor, row_stride: int, row: int | None) -> Tensor:
    batch, K = parts.shape[:2]
    N = prod(parts.shape[2:])
    rows, columns = tile(K, N)
    launch(sum_parts_kernel, batch * cdiv(N, columns), parts, sums, row_stride, K, N, ROW=row, ROWS=rows, COLUMNS=columns)
    return sums


def tile(K: int, N: int) -> tuple[int, int]:
    """Rows and columns that a program adds up at a time."""
    rows = min(next_power_of_2(max(1, K)), _ROWS)
    return rows, min(max(_ELEMENTS // rows, _COLUMNS), next_power_of_2(N))


def sum_first(parts: Tensor, sums: Tensor) -> Tensor:
    """parts (K, ...) into sums (...): of any strides if it is a tensor of tokens, (batch, seqlen, ...).

    The kernel writes rows that are evenly apart; torch writes others.
    """
    if sums.is_contiguous():
        sum_parts(parts[None], sums[None])
        return sums
    (batch, seqlen), (first, second) = sums.shape[:2], sums.stride()[:2]
    if sums[0, 0].is_contiguous() and (batch == 1 or first == seqlen * second):
        return _launch(parts[None], sums, second, sums[0, 0].numel())
    return sums.copy_(parts.sum(0))


def settle(gradient: Tensor, into: Tensor | None) -> Tensor:
    """The gradient in the place that was asked for: moved there, if it could not be written there."""
    if into is None:
        return gradient
    if into.data_ptr() != gradient.data_ptr():
        sum_first(gradient.contiguous()[None], into)  # which can be recorded, as torch's copy cannot
    return into
