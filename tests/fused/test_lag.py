"""Decays that are deferred: heads of which a step leaves from most to nothing, so that lag is kept, applied and dropped."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.hopper.lag import MOST_LAG
from ssd.registry import get_variant
from ssd.types import Options, SSDInputs
from tests.errors import assert_forward_right
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_hopper import needs_hopper
from tests.inputs import Case, Shape, random_inputs, set_decays

# Of each head's state by the sub-chunks, one after the other, as -A_last. Weak steps between strong ones, so that R is mostly
# what weak ones have left when it is scaled.
DECAYS = (0.7,), (6.0,), (43.5, 0.3, 0.3, 0.3), (31.0,), (30.0, 0.2, 13.9, 0.1), (43.9, 44.1), (83.0,), (300.0, 0.1)
SHAPE = Shape(1, 9 * 64 + 5, len(DECAYS), 64, 1, 256, 64)
START = Case(D="h", initial_states=True, dt_dtype=torch.float32)
AGAIN = Options(save_states=False)  # where states are written nothing is deferred
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
LAG, MASKS, SCAN = (f"fused.kernels.hopper.{name}" for name in ("lag", "masks", "wide_scan"))
FAULTS = {
    "nothing of a state left where lag is applied": (LAG, "state = state * gl.exp2(total * LOG2E)", "state = state * 0.0"),
    "lag kept after it is applied": (LAG, "gl.where(total < -MOST_LAG, 0.0, total), total", "total, total"),
    "lag not in what is read": (LAG, "    exponent += lag * LOG2E\n", ""),
    "lag not in the weights": (LAG, "w * gl.exp2(lag * -LOG2E)", "w"),
    "a state never dropped": (SCAN, "use_acc=is_left", "use_acc=True"),
    "lag not in the last state": (SCAN, "apply_decay(state, lag, DEFERRED)", "state"),
    "a head with the other's lag": (MASKS, "defer_decay(exponent, w, lag1, end1)", "defer_decay(exponent, w, lag1, end0)"),
}


def draw(headdim: int, device: str, seqlen: int = SHAPE.seqlen, nheads: int = len(DECAYS)) -> SSDInputs:
    inputs = random_inputs(replace(SHAPE, headdim=headdim, seqlen=seqlen, nheads=nheads), START, torch.bfloat16, device)
    return set_decays(inputs, DECAYS[:nheads])


def run(executor: Executor, inputs: SSDInputs, **dealing) -> None:
    with hopper_on_cpu(executor, **dealing):
        assert_forward_right(get_variant("persistent"), inputs, AGAIN)
    assert "hopper_wide_scan_kernel" in executor.launched


def test_heads_are_of_every_kind():
    """Of one lag is never applied, of others after a strong step or a weak one; others lose theirs in some steps or all."""
    applied, dropped = torch.zeros(2, len(DECAYS), dtype=torch.int64)
    lag, inputs = torch.zeros(len(DECAYS)), draw(64, "cpu")
    for A_last in (inputs.dt * inputs.A)[0, : 9 * 64].unflatten(0, (9, 64)).sum(1):
        is_left = A_last > -MOST_LAG.value
        lag = torch.where(is_left, lag + A_last, 0)
        applied, dropped = applied + (lag < -MOST_LAG.value), dropped + ~is_left
        lag = torch.where(lag < -MOST_LAG.value, 0, lag)
    assert applied.tolist() == [0, 1, 3, 4, 2, 0, 0, 0] and dropped.tolist() == [0, 0, 0, 0, 0, 4, 9, 5]


@needs_hopper
@pytest.mark.parametrize("headdim", (64, 128))
@pytest.mark.parametrize("nheads", (5, len(DECAYS)))
@pytest.mark.parametrize(("seqlen", "options"), ((SHAPE.seqlen, AGAIN), (4096 + 63, AGAIN),
                                                 (4096 + 63, replace(AGAIN, segments=False))), ids=("short", "cut", "whole"))
def test_right(headdim, nheads, seqlen, options):
    assert_forward_right(get_variant("persistent"), draw(headdim, "cuda", seqlen, nheads), options)


@needs_cpu
@pytest.mark.parametrize(("headdim", "nheads", "dealing"), (
    (64, len(DECAYS), {"blocks": 2}), (128, len(DECAYS), {"blocks": 2}), (64, 5, {"blocks": 2}),
    (128, len(DECAYS), {"blocks": 8, "cut": (4, 4)})), ids=("two heads", "a head", "odd heads", "cut"))
def test_right_in_the_executor(headdim, nheads, dealing):
    run(Executor(*KERNELS), draw(headdim, "cpu", nheads=nheads), **dealing)


@needs_cpu
@pytest.mark.parametrize("name", FAULTS)
def test_found(name):
    """Each fault gives wrong results, so that decays are deferred and every part of it is needed."""
    module, *edit = FAULTS[name]
    with pytest.raises(AssertionError):
        run(Executor(LAG, *KERNELS, edits={module: [tuple(edit)]}), draw(64, "cpu"), blocks=2)


@needs_cpu
def test_what_is_left_of_a_state():
    """Of states given, by one sub-chunk without x: all that exp(-44) and more leave, relative to itself."""
    inputs = draw(64, "cpu", seqlen=64)
    inputs = replace(inputs, A=-torch.tensor([0.1, 5.0, 13.0, 26.0, 37.0, 43.0, 46.0, 60.0]), x=torch.zeros_like(inputs.x),
                     dt=torch.full_like(inputs.dt, 1 / 64))
    with hopper_on_cpu(Executor(*KERNELS), blocks=2):
        _, got, _ = get_variant("persistent").forward(inputs, AGAIN, False)
    left = (got / inputs.initial_states)[0].flatten(1)
    expected = inputs.A.exp().where(inputs.A + MOST_LAG.value > 0, 0)
    assert torch.allclose(left, expected[:, None], rtol=1e-4, atol=0)


@needs_cpu
def test_nan_is_not_hidden():
    """Outputs show it, of heads that lose their state in each step too."""
    inputs = draw(64, "cpu")
    inputs.x[:, 70] = torch.nan
    with hopper_on_cpu(Executor(*KERNELS), blocks=2):
        out, _, _ = get_variant("persistent").forward(inputs, AGAIN, False)
    assert not out[:, :64].isnan().any() and out[:, 70].isnan().all()
