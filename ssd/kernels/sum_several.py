"""sum_several: partial sums of several gradients added up in one launch, in fixed order.

Reads up to five parts (K, ...), contiguous fp32; writes their sums over K, contiguous, in any dtype.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import launch
from .arguments import cdiv
from .sum_parts import add_parts

_MOST = 5
_ROWS, _COLUMNS, _WARPS = 16, 64, 4


@triton.jit
def sum_columns(parts, sums, K, N, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of columns, if parts have that many; returns the number of the tile among those of the next parts."""
    if parts is not None:
        tiles = tl.cdiv(N, COLUMNS)
        if (tile >= 0) & (tile < tiles):
            columns = tl.cast(tile, tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
            total = add_parts(parts, columns, K, N, ROWS, COLUMNS)
            tl.store(sums + columns, total.to(sums.dtype.element_ty), mask=columns < N)
        tile -= tiles
    return tile


@triton.jit
def sum_several_kernel(parts0, sums0, K0, N0, parts1, sums1, K1, N1, parts2, sums2, K2, N2, parts3, sums3, K3, N3, parts4,
                       sums4, K4, N4, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = sum_columns(parts0, sums0, K0, N0, tl.program_id(0), ROWS, COLUMNS)
    tile = sum_columns(parts1, sums1, K1, N1, tile, ROWS, COLUMNS)
    tile = sum_columns(parts2, sums2, K2, N2, tile, ROWS, COLUMNS)
    tile = sum_columns(parts3, sums3, K3, N3, tile, ROWS, COLUMNS)
    sum_columns(parts4, sums4, K4, N4, tile, ROWS, COLUMNS)


def sum_several(*pairs: tuple[Tensor, Tensor]) -> None:
    """Fills the second of each pair, sums (...), from the first, parts (K, ...)."""
    args, programs = [], 0
    for parts, sums in pairs:
        columns = sums.numel()
        args += parts, sums, parts.shape[0], columns
        programs += cdiv(columns, _COLUMNS)
    args += [None, None, 0, 0] * (_MOST - len(pairs))
    launch(sum_several_kernel, programs, *args, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS)
