"""Packed weights: a product with the error of one rounding."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fused.kernels.hopper.weights import add_multiple, pack_weights, weigh
from tests.fused.test_hopper import needs_hopper


@gluon.jit
def weigh_tile(x, w, y, by_column, by_row, sums, factor):
    """Of a tile [64, 64] x w, of weights by column and by row, and y + factor x."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(row, 1) * 64 + gl.expand_dims(column, 0)
    tile = gl.load(x + at)
    gl.store(by_column + at, weigh(tile, gl.expand_dims(pack_weights(gl.load(w + column), tile.dtype), 0)))
    gl.store(by_row + at, weigh(tile, gl.expand_dims(pack_weights(gl.load(w + row), tile.dtype), 1)))
    gl.store(sums + at, add_multiple(gl.load(y + at), tile, factor))


@needs_hopper
@pytest.mark.parametrize(("dtype", "ends"), ((torch.bfloat16, (-30, 19)), (torch.float16, (-3, 3))), ids=str)
def test_rounds_once(dtype, ends):
    x, y = torch.randn(2, 64, 64, device="cuda")
    x, w = x.to(dtype), torch.logspace(*ends, 64, base=10.0, device="cuda")
    w[7] = 0.0
    by_column, by_row, sums = torch.empty_like(x), torch.empty_like(x), torch.empty_like(y)
    weigh_tile[(1,)](x, w, y, by_column, by_row, sums, 0.75, num_warps=4)
    info = torch.finfo(dtype)
    for got, exact in ((by_column, x.double() * w.double()), (by_row, x.double() * w.double()[:, None])):
        assert ((got.double() - exact).abs() <= 1.01 * info.eps / 2 * exact.abs().clamp(min=info.tiny)).all()
    assert torch.allclose(sums.double(), y.double() + 0.75 * x.double(), rtol=1e-6, atol=1e-6)
