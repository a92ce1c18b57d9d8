"""The Hopper path without a GPU, by the same bounds as on one (test_hopper): its kernels run in `tests.executor`.

Each case runs under several schedules, whose results must be the same bits.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from ssd import hopper_backward
from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import assert_all_accurate, cotangents, error, results, truths
from tests.executor import Executor
from tests.inputs import Case, Shape, random_inputs
from tests.ssd.hopper_on_cpu import KERNELS, hopper_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
SEEDS = range(3)
RAGGED = Shape(2, 150, 4, 64, 2, 64, 128)
LONG = Shape(1, 9 * 64 + 22, 4, 64, 1, 64, 64)
WIDE = Shape(1, 5 * 64 - 1, 2, 64, 1, 128, 128)
USUAL = Options()
PLAIN = Case(dt_dtype=torch.float32)  # the interpreter, which runs the other kernels, rounds to bf16 in its own way
START = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, dt_dtype=torch.float32)
SCAN, STATES, GROUP = "hopper_scan_kernel", "hopper_states_kernel", "hopper_group_kernel"


@dataclass(frozen=True)
class Way:
    """What runs: the inputs, the variant and its options, and how `hopper_on_cpu` deals the work.

    runs: the kernels for Hopper that a forward and a backward launch, in order.
    """

    shape: Shape
    case: Case
    runs: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    variant: str = "persistent"
    options: Options = USUAL
    blocks: int = 2
    cut: tuple[int, int] | None = None
    splits: int | None = None


AGAIN = Options(save_states=False)
SAVED, CUT = (SCAN, STATES, GROUP), (STATES, SCAN, STATES, STATES, GROUP)
TWO_LEVEL = STATES, SCAN, STATES, GROUP
WAYS = {
    "ragged": Way(RAGGED, PLAIN, SAVED),
    "ragged, recomputed": Way(RAGGED, START, SAVED, torch.float16, options=AGAIN),
    "one token": Way(replace(RAGGED, batch=8, seqlen=1), START, SAVED, blocks=3),
    "several rounds": Way(replace(RAGGED, batch=3), START, SAVED, options=AGAIN),
    "cut": Way(LONG, START, CUT, blocks=5, cut=(3, 2)),
    "cut, recomputed": Way(LONG, START, CUT, torch.float16, options=AGAIN, blocks=8, cut=(4, 4)),
    "whole and cut": Way(replace(RAGGED, batch=3, nheads=2, ngroups=1), START, CUT, cut=(2, 1)),
    "wide": Way(WIDE, START, SAVED),
    "wide, recomputed": Way(WIDE, PLAIN, CUT, torch.float16, options=AGAIN, blocks=4, cut=(2, 2)),
    "documents": Way(RAGGED, replace(START, documents="seq_idx"), SAVED),
    "strong decay": Way(RAGGED, replace(START, strong_decay=True), SAVED),
    "packed, gate": Way(RAGGED, Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, z=True, packed=True,
                                     dt_limit=(0.02, 0.08)), (STATES, GROUP), torch.float16),
    "spans": Way(LONG, START, TWO_LEVEL, variant="fused"),
    "spans, recomputed": Way(LONG, START, TWO_LEVEL, torch.float16, variant="fused", options=AGAIN),
    "spans in turn": Way(LONG, PLAIN, TWO_LEVEL, options=Options(stationary=False)),
    "states in fp32": Way(RAGGED, replace(START, state_dtype=torch.float32), TWO_LEVEL, variant="fused"),
    "cut for spans": Way(LONG, START, (STATES, *TWO_LEVEL[:2], *CUT[2:]), variant="fused", options=AGAIN, blocks=5, cut=(3, 2)),
    "heads in parts": Way(replace(RAGGED, batch=1, nheads=6, ngroups=1), START, SAVED, torch.float16, splits=2),
    "a head in each part": Way(replace(RAGGED, batch=1, ngroups=1), START, SAVED, torch.float16, splits=4),
}


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


def under_schedules(executor: Executor, way: Way, run) -> dict[str, torch.Tensor]:
    """Results by name of run(), the same under every seed."""
    first = None
    for executor.seed in SEEDS:
        executor.launched.clear()
        with hopper_on_cpu(executor, way.blocks, way.cut, way.splits):
            got = run()
        first = first or got
        assert all(torch.equal(t, first[name]) for name, t in got.items())
    return first


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", WAYS)
def test_right(name, executor):
    way = WAYS[name]
    inputs, variant = random_inputs(way.shape, way.case, way.dtype), get_variant(way.variant)
    ways = cotangents(inputs)
    got = under_schedules(executor, way, lambda: results(variant, inputs, *ways, way.options))
    assert tuple(executor.launched) == way.runs
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(gradient, executor):
    way = WAYS["ragged"]
    inputs, variant = random_inputs(way.shape, START, way.dtype), get_variant(way.variant)
    dout, dfinal_states = cotangents(inputs)
    ways = (dout, None) if gradient == "dout" else (torch.zeros_like(dout), dfinal_states)
    got = under_schedules(executor, way, lambda: results(variant, inputs, *ways))
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.parametrize("like", [lambda t: t.bfloat16(), lambda t: t.half(), lambda t: t.mT.contiguous().mT,
                                  lambda t: t[:, :1].expand_as(t)], ids=["bf16", "fp16", "transposed", "expanded"])
def test_states_of_any_form(like, executor):
    """The kernels read them as they were given, contiguous ones."""
    way = replace(WAYS["ragged"], shape=replace(RAGGED, batch=1, seqlen=70), options=AGAIN)
    inputs, variant = random_inputs(way.shape, START, way.dtype), get_variant(way.variant)
    inputs = replace(inputs, initial_states=like(inputs.initial_states))
    dout, dfinal_states = cotangents(inputs)
    ways = dout, like(dfinal_states)
    got = under_schedules(executor, way, lambda: results(variant, inputs, *ways, way.options))
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


def test_steps_of_zero(executor):
    """Their logarithm, in which masks are made, is -inf."""
    way = WAYS["ragged"]
    inputs, variant = random_inputs(way.shape, replace(PLAIN, D="h", dt_limit=(0.0, 1.0)), way.dtype), get_variant(way.variant)
    inputs.dt[:, ::3] = -1
    ways = cotangents(inputs)
    got = under_schedules(executor, way, lambda: results(variant, inputs, *ways))
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


def test_last_state(executor):
    """As a split backward asks for it: few states are written on the way there."""
    inputs = random_inputs(replace(LONG, seqlen=LONG.seqlen + 64), START, torch.bfloat16)
    run = lambda: {"last": hopper_backward.last_state(inputs, Options())}  # noqa: E731
    got = under_schedules(executor, Way(LONG, START, (), blocks=5, cut=(3, 2)), run)["last"]
    assert executor.launched == [STATES, STATES]
    truth = truths(inputs, *cotangents(inputs))["final_states"]
    assert error(got, truth).rms < 1e-2
