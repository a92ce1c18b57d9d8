"""Decays of pairs as products of factors: sub-chunks that decay by less than factors hold, by about as much, and by more."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.hopper.factors import MOST
from ssd.registry import get_variant
from ssd.types import SSDInputs
from tests.errors import assert_right, cotangents
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_hopper import needs_hopper
from tests.inputs import Case, Shape, random_inputs, set_decays

BOUND = 2 * MOST.value * torch.tensor(2.0).log().item()  # what factors can hold, as -A_last
DECAYS = (0.7,), (20.0, 300.0), (BOUND - 1, BOUND + 1), (BOUND + 1, 0.1, BOUND - 1)  # of each head by the sub-chunks, in turn
SHAPE = Shape(1, 3 * 64 + 5, len(DECAYS), 64, 1, 128, 64)
FACTORS = "fused.kernels.hopper.factors"
FAULTS = {
    "factors of every decay": ("if gl.minimum(first, last) * LOG2E > -2 * MOST:", "if True:"),
    "pairs of strong decays not decayed": ("t * decay(of_i - of_j)", "t"),
    "pairs of weak decays not decayed": ("(t * of_i) * of_j if", "t if"),
    "tokens of strong decays by their factors": ("gl.where(root > 0, of_i * root, decay(of_i))", "of_i * root"),
    "tokens of weak decays by powers": ("gl.where(root > 0, of_i * root, decay(of_i))", "decay(of_i)"),
    "to the end of strong decays by factors": ("gl.where(root > 0, of_j * root, decay(root - of_j))", "of_j * root"),
    "to the end of weak decays by powers": ("gl.where(root > 0, of_j * root, decay(root - of_j))", "decay(root - of_j)"),
}


def draw(device: str, headdim: int = 64, seqlen: int = SHAPE.seqlen) -> SSDInputs:
    shape = replace(SHAPE, headdim=headdim, seqlen=seqlen)
    return set_decays(random_inputs(shape, Case(D="h", dt_dtype=torch.float32), torch.bfloat16, device), DECAYS)


def run(executor: Executor, headdim: int = 64) -> None:
    inputs = draw("cpu", headdim)
    with hopper_on_cpu(executor, blocks=2):
        assert_right(get_variant("persistent"), inputs, *cotangents(inputs))
    assert "hopper_group_kernel" in executor.launched


def test_sub_chunks_are_of_both_kinds():
    """Of a head all weak, of the others both; and some within 2 % of the bound, on either side."""
    inputs = draw("cpu")
    decays = -(inputs.dt * inputs.A)[0, : 3 * 64].unflatten(0, (3, 64)).sum(1)
    assert (decays > BOUND).sum(0).tolist() == [0, 1, 1, 1]
    assert ((decays / BOUND - 1).abs() < 0.02).sum(0).tolist() == [0, 0, 3, 2]


@needs_hopper
@pytest.mark.parametrize("headdim", (64, 80, 128))
def test_right(headdim):
    inputs = draw("cuda", headdim, 1024 + 5)
    assert_right(get_variant("persistent"), inputs, *cotangents(inputs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
@pytest.mark.parametrize("headdim", (64, 80))
def test_right_in_the_executor(headdim):
    run(Executor(*KERNELS), headdim)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
@pytest.mark.parametrize("name", FAULTS)
def test_found(name):
    """Each fault gives wrong results, so that both ways run and each part of them is needed."""
    with pytest.raises(AssertionError):
        run(Executor(*KERNELS, edits={FACTORS: [FAULTS[name]]}))
