"""Decays that are put off: heads of which a step leaves from most to nothing, so that lag is kept, settled and reset."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.hopper.lag import MOST
from ssd.registry import get_variant
from ssd.types import Options, SSDInputs
from tests.errors import assert_all_accurate, assert_forward_right, cotangents, results, truths
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_hopper import needs_hopper
from tests.inputs import Case, Shape, random_inputs

DECAYS = 0.7, 6.0, 14.0, 31.0, 43.0, 46.0, 83.0, 300.0  # of a head's state by a sub-chunk, on average, as -A_last
SHAPE = Shape(1, 9 * 64 + 5, len(DECAYS), 64, 1, 256, 64)
START = Case(D="h", initial_states=True, dt_dtype=torch.float32)
AGAIN = Options(save_states=False)  # where states are written nothing is put off
over_headdim = pytest.mark.parametrize("headdim", (64, 128))


def draw(headdim: int, device: str) -> SSDInputs:
    inputs = random_inputs(replace(SHAPE, headdim=headdim), START, torch.bfloat16, device)
    rates = torch.tensor(DECAYS, device=device) / 64
    return replace(inputs, A=-rates / inputs.dt.float().mean((0, 1)))


def test_heads_are_of_every_kind():
    """Of some lag is never settled, of others after several steps, or two; some forget their state in a step or in each."""
    inputs = draw(64, "cpu")
    decays = -(inputs.dt * inputs.A)[0, : 9 * 64].unflatten(0, (9, 64)).sum(1)
    most, least = decays.amax(0), decays.amin(0)
    assert decays[:, 0].sum() < MOST.value < decays[:, 1].sum() and 3 * most[1] < MOST.value
    assert most[3] < MOST.value < 2 * least[3]
    assert least[4] < MOST.value < most[4] and least[6] > MOST.value


@needs_hopper
@over_headdim
@pytest.mark.parametrize("seqlen", (SHAPE.seqlen, 4096 + 63))
def test_right(headdim, seqlen):
    inputs = draw(headdim, "cuda")
    again = -(-seqlen // SHAPE.seqlen)
    longer = {name: getattr(inputs, name).repeat(1, again, *([1] * (getattr(inputs, name).dim() - 2)))[:, :seqlen].contiguous()
              for name in ("x", "dt", "B", "C")}
    assert_forward_right(get_variant("persistent"), replace(inputs, **longer), AGAIN)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
@over_headdim
@pytest.mark.parametrize("dealing", ({"blocks": 2}, {"blocks": 8, "cut": (4, 4)}), ids=("whole", "cut"))
def test_right_in_the_executor(headdim, dealing):
    inputs = draw(headdim, "cpu")
    ways = cotangents(inputs)
    executor = Executor(*KERNELS)
    with hopper_on_cpu(executor, **dealing):
        got = results(get_variant("persistent"), inputs, *ways, AGAIN)
    assert "hopper_wide_scan_kernel" in executor.launched
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)
