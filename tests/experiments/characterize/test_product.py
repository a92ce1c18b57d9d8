"""The product that counters are checked by."""

import pytest
import torch

from experiments.characterize.product import TILE, multiply


def test_product(device):
    a, b = torch.randn(2, 2 * TILE, 2 * TILE, device=device, dtype=torch.float16)
    torch.testing.assert_close(multiply(a, b), a @ b, rtol=1e-2, atol=1e-2)


def test_a_part_of_a_tile():
    with pytest.raises(ValueError, match="a: got n = 130, expected a multiple of 128"):
        multiply(*torch.zeros(2, 130, 130))
