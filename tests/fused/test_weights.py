"""Weights in two halves of bf16: a product with the error of one rounding."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fused.kernels.hopper.weights import add_scaled, split_weights, weigh
from ssd.runtime.devices import is_hopper

GPU = torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))


@gluon.jit
def weigh_tile(x, w, y, weighed, sums, factor):
    """Of a tile [64, 64] x w and y + factor x."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(row, 1) * 64 + gl.expand_dims(column, 0)
    tile = gl.load(x + at)
    gl.store(weighed + at, weigh(tile, gl.expand_dims(split_weights(gl.load(w + column), tile.dtype), 0)))
    gl.store(sums + at, add_scaled(gl.load(y + at), tile, factor))


@pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 9")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_rounds_once(dtype):
    x, y = torch.randn(2, 64, 64, device="cuda")
    x, w = x.to(dtype), torch.logspace(-3, 3, 64, base=10.0, device="cuda")
    weighed, sums = torch.empty_like(x), torch.empty_like(y)
    weigh_tile[(1,)](x, w, y, weighed, sums, 0.75, num_warps=4)
    exact = x.double() * w.double()
    half_a_place = torch.finfo(dtype).eps / 2
    assert ((weighed.double() - exact).abs() <= 1.01 * half_a_place * exact.abs().clamp(min=2.0**-14)).all()
    assert torch.allclose(sums.double(), y.double() + 0.75 * x.double(), rtol=1e-6, atol=1e-6)
