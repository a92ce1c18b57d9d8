"""The device functions by themselves, where rounding would show."""

import pytest
import torch
import triton
import triton.language as tl

from ssd.kernels.device import decay, sigmoid, softplus


@triton.jit
def _decay_kernel(v, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, decay(tl.load(v + at)))


@triton.jit
def _sigmoid_kernel(v, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, sigmoid(tl.load(v + at)))


@triton.jit
def _softplus_kernel(v, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, softplus(tl.load(v + at)))


@pytest.mark.parametrize(
    "kernel, function",
    [(_decay_kernel, lambda v: v.clamp(max=0).exp()), (_sigmoid_kernel, torch.sigmoid),
     (_softplus_kernel, torch.nn.functional.softplus)],
    ids=("decay", "sigmoid", "softplus"),
)  # fmt: skip
def test_relative_error(kernel, function, device):
    """From far below 0, where a result is tiny, to far above, where nothing may overflow and a decay stays 1."""
    v = torch.cat([torch.linspace(-80, 100, 1009), torch.tensor([-100, -20, -1e-6, 0, 1e-6, 0.5, 1, 19.99, 20, 20.01, 80,
                                                                 1e3, 1e4, 88, 89])]).to(device)  # fmt: skip
    out = torch.empty_like(v)
    assert v.numel() == 1024
    kernel[(1,)](v, out, 1024)
    # exp2 of v log2(e): the product is rounded, and so the result is off by |v| roundings
    tolerance = (8 + v.abs().clamp(max=100)) * torch.finfo(torch.float32).eps
    truth = function(v.double())
    assert ((out - truth).abs() <= tolerance * truth + 1e-37).all()
