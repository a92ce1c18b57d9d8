"""The kernels of the causal convolution: how they cut their work, how far their offsets reach, what they compile to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd.block.conv1d import causal_conv1d_fn
from ssd.block.kernels import conv1d
from ssd.block.kernels.conv1d import pieces
from tests.block.test_conv1d import EVERYTHING, Case, assert_right, inputs

pytestmark = pytest.mark.usefixtures("poison")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", (Case(dim=3), replace(EVERYTHING, dim=3, documents=(255, 45))), ids=str)
def test_longest_pieces(case, device, monkeypatch):
    """As on a GPU that has enough to do. The second document begins with the last token of a piece."""
    monkeypatch.setattr(conv1d, "_SHORTEST", 256)
    assert pieces(torch.empty(1, 262, 3, device=device), 1) == (256, 2)
    assert_right(inputs(replace(case, batch=1, seqlen=262), device))


def test_offsets_beyond_int32(device):
    """Tokens 2^30 elements apart; no more than what they are in is touched."""
    memory = torch.UntypedStorage(2 * (3 * 2**30 + 20), device=device)
    x = torch.randn(1, 4, 20, device=device).half()
    far = torch.tensor([], dtype=x.dtype, device=device).set_(memory, 0, x.shape, (2**32, 2**30, 1)).copy_(x)
    weight = torch.randn(20, 4, device=device)
    for t in (far, x):
        t.requires_grad_()
        causal_conv1d_fn(t.mT, weight, activation="silu").backward(torch.ones(1, 20, 4, device=device).half())
    assert torch.equal(far.grad, x.grad)
