"""The device functions by themselves, where rounding would show."""

import pytest
import torch
import triton
import triton.language as tl

from ssd.kernels.device import decay, sigmoid, softplus


@triton.jit
def _kernel(v, out, function: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, function(tl.load(v + at)))


@pytest.mark.parametrize("function, truth", [
    (decay, lambda v: v.clamp(max=0).exp()), (sigmoid, torch.sigmoid), (softplus, torch.nn.functional.softplus)],
    ids=("decay", "sigmoid", "softplus"))
def test_relative_error(function, truth, device):
    """From far below 0, where a result is tiny, to far above, where nothing may overflow and a decay stays 1."""
    v = torch.cat([torch.linspace(-80, 100, 1009), torch.tensor([
        -100, -20, -1e-6, 0, 1e-6, 0.5, 1, 19.99, 20, 20.01, 80, 1e3, 1e4, 88, 89])]).to(device)
    out = torch.empty_like(v)
    assert v.numel() == 1024
    _kernel[(1,)](v, out, function, 1024)
    # exp2 of v log2(e): the product is rounded, and so the result is off by |v| roundings
    tolerance = (8 + v.abs().clamp(max=100)) * torch.finfo(torch.float32).eps
    expected = truth(v.double())
    assert ((out - expected).abs() <= tolerance * expected + 1e-37).all()
