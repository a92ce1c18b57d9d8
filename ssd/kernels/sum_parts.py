"""sum_parts: partial sums added up, in fixed order.

Reads parts (batch, K, N), contiguous fp32; writes their sums over K, (batch, N), contiguous, in any dtype.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..tuning import next_power_of_2
from .arguments import cdiv
from .launch import launch

_ROWS, _COLUMNS, _ELEMENTS = 256, 16, 1024  # at most, at least, and of a tile unless its columns are the fewest


@triton.jit
def sum_parts_kernel(parts, sums, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tiles = tl.cdiv(N, COLUMNS)
    batch = tl.program_id(0) // tiles
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    parts += tl.cast(batch, tl.int64) * K * N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, ROWS):
        at = (tl.cast(k, tl.int64) + rows)[:, None] * N + columns[None, :]
        total += tl.load(parts + at, mask=(k + rows < K)[:, None] & inside[None, :], other=0.0)
    tl.store(sums + tl.cast(batch, tl.int64) * N + columns, tl.sum(total, 0).to(sums.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, sums: Tensor) -> Tensor:
    """parts (batch, K, ...) into sums (batch, ...), both contiguous; returns sums."""
    batch, K = parts.shape[:2]
    N = parts[0, 0].numel()
    rows = min(next_power_of_2(K), _ROWS)
    columns = min(max(_ELEMENTS // rows, _COLUMNS), next_power_of_2(N))
    launch(sum_parts_kernel, batch * cdiv(N, columns), parts, sums, K, N, ROWS=rows, COLUMNS=columns)
    return sums


def sum_first(parts: Tensor, sums: Tensor) -> Tensor:
    """parts (K, ...) into sums (...), as above."""
    return sum_parts(parts[None], sums[None])[0]
