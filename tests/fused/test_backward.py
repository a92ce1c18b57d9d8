"""What is particular to the backward in group loops: how the heads of a group are shared out, and documents."""

from dataclasses import replace

import pytest
import torch

from fused.kernels import dC_dCB
from ssd.registry import get_variant
from tests.errors import assert_lands, assert_right, cotangents, results
from tests.inputs import EVERYTHING, GPU, HALF, Case, Shape, random_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("splits", (1, 2, 4))
@pytest.mark.parametrize("dtype", (HALF, torch.float32), ids=str)
def test_splits_of_a_group(splits, dtype, device, monkeypatch):
    """Three heads in a group: all in one split; two and one; one in each of three, and none in the last."""
    monkeypatch.setattr(dC_dCB, "head_splits", lambda inputs, programs: splits)
    shape = Shape(2, 150, 6, 64, 2, 128, 128) if GPU else Shape(1, 70, 6, 20, 2, 24, 64)
    assert_right("fused", random_inputs(shape, EVERYTHING, dtype, device))


@pytest.mark.parametrize("headdim", (16, 32, 64) if GPU else (16,))
@pytest.mark.parametrize("dstate", (16, 32, 64) if GPU else (16,))
@pytest.mark.parametrize("D", ("h", "hp"))
def test_narrow_tiles(headdim, dstate, D, device):
    """Which have layouts of their own in a product; at 16 and 16, D and heads to loop over, ptxas lost an address."""
    case = replace(EVERYTHING, D=D)
    assert_right("fused", random_inputs(Shape(2, 70, 2, headdim, 1, dstate, 64), case, HALF, device))


@pytest.mark.parametrize("splits", (1, 2))
def test_gradients_in_place_of_parts(splits, device, monkeypatch):
    """A strided dB and dC are the same bits whether or not they are the sums of parts."""
    monkeypatch.setattr(dC_dCB, "head_splits", lambda inputs, programs: splits)
    inputs = random_inputs(Shape(1, 40, 2), EVERYTHING, HALF, device)
    packed = torch.zeros(*inputs.B.shape[:3], 2 * inputs.dstate, dtype=HALF, device=device)
    assert_lands(get_variant("fused"), inputs, {"dB": packed[..., ::2], "dC": packed[..., 1::2]})


@pytest.mark.parametrize("chunk_size", (16, 128))
def test_no_gradient_crosses_documents(chunk_size, device):
    """Only the outputs of a row's last document have a gradient: what came before it gets none at all, to the bit."""
    case = Case(D="h", z=True, initial_states=True, documents="seq_idx")
    inputs = random_inputs(Shape(1, 150, 2, 16, 1, 16, chunk_size), case, HALF, device)
    last = inputs.seq_idx == inputs.seq_idx[:, -1:]
    assert not last.all()
    dout, dfinal_states = cotangents(inputs)
    got = results("fused", inputs, dout * last[..., None, None], dfinal_states)
    assert not got["dinitial_states"].any()
    for grad in ("dx", "dz", "dB", "dC"):
        assert not got[grad][~last].any() and got[grad][last].any()
