"""Products by cuBLAS without a workspace: those of torch, and by torch where pointers do not say it all."""

import pytest
import torch
import torch.nn.functional as F

from ssd.runtime import products
from ssd.runtime.products import multiply
from tests.inputs import GPU

needs_gpu = pytest.mark.skipif(not GPU, reason="needs cuBLAS")


def draw(device, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


@needs_gpu
@pytest.mark.parametrize(("rows", "k", "n"), (((2, 700), 256, 344), ((1,), 64, 8), ((300,), 2560, 10576), ((5, 7), 72, 40)))
def test_it_is_the_product(rows, k, n, device):
    assert products._find_library() is not None
    x, weight = draw(device, *rows, k), draw(device, n, k)
    got, expected = multiply(x, weight), F.linear(x.double(), weight.double())
    assert got.shape == (*rows, n) and got.dtype == torch.bfloat16
    assert (got - expected).norm() < 3e-3 * expected.norm()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(multiply(x, weight), got)


@needs_gpu
def test_torch_has_its_workspace_again(device):
    """Splits that need one are taken after it."""
    x, weight = draw(device, 64, 5120), draw(device, 2560, 5120)
    before = F.linear(x, weight)
    multiply(x, weight)
    assert torch.equal(F.linear(x, weight), before)


@pytest.mark.parametrize("change", (
    lambda x, w: (x.float(), w.float()), lambda x, w: (x.mT.contiguous().mT, w), lambda x, w: (x, w.t().contiguous().t()),
    lambda x, w: (x[:0], w), lambda x, w: (x[..., ::2], w[:, ::2])), ids=("fp32", "rows", "columns", "none", "every other"))
def test_what_goes_through_torch(change, device):
    x, weight = change(draw(device, 12, 64), draw(device, 40, 64))
    assert torch.equal(multiply(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("change", (lambda x, w: (x, w[:, :32].contiguous()), lambda x, w: (x.half(), w)), ids=("k", "dtypes"))
def test_what_torch_refuses(change, device):
    x, weight = change(draw(device, 12, 64), draw(device, 40, 64))
    with pytest.raises(RuntimeError):
        multiply(x, weight)
