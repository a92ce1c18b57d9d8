"""Every optimisation of fused and persistent, switched off: alone, and with those that only then have an effect."""

from dataclasses import replace

import pytest

from ssd.registry import get_variant
from ssd.types import Options, SSDInputs
from tests.errors import assert_forward_right, assert_right
from tests.inputs import EVERYTHING, GPU, HALF, Case, Shape, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
SHAPE = Shape(1, 1000, 8, 64, 2, 128, 256) if GPU else Shape(1, 150, 2, 20, 1, 40, 128)
CASES = {
    "everything": replace(EVERYTHING, documents="varlen"),
    "strong_decay": Case(strong_decay=True, D="h", initial_states=True),
}
OFF = {
    "fused": ("exp2", "fuse_bmm", "fuse_bmm low_precision_CB", "fuse_states", "save_states gluon", "two_level",
              "two_level exp2", "two_level causal_blocks", "two_level fuse_bmm causal_blocks",
              "two_level fuse_bmm low_precision_CB fuse_states"),
    "persistent": ("exp2", "fuse_bmm", "fuse_bmm low_precision_CB", "segments", "segments save_states gluon", "stationary",
                   "stationary fuse_bmm"),
}
OFF_BACKWARD = ("exp2", "save_states", "fuse_backward", "fuse_backward save_states")
over_cases = pytest.mark.parametrize("case", CASES)


def switch_off(names: str) -> Options:
    return Options(**dict.fromkeys(names.split(), False))


def draw(case: str, device: str) -> SSDInputs:
    """One head shows in the interpreter what strong decay does to it."""
    shape = replace(SHAPE, nheads=1) if case == "strong_decay" and not GPU else SHAPE
    return random_inputs(shape, CASES[case], HALF, device)


@over_cases
@pytest.mark.parametrize(("name", "off"), [(name, off) for name in OFF for off in OFF[name]])
def test_switched_off(name, off, case, device):
    assert_forward_right(get_variant(name), draw(case, device), switch_off(off))


@over_cases
@pytest.mark.parametrize("off", OFF_BACKWARD)
def test_gradients_with_it_off(off, case, device):
    assert_right("fused", draw(case, device), options=switch_off(off))


@pytest.mark.parametrize("name", OFF)
def test_every_option_is_tried(name):
    """Elsewhere: `low_precision_states` is a matter of `state_dtype`, which the public function sees to; split_backward and
    replay have tests of their own. The backward of persistent is that of fused.
    """
    tried = {option for off in (*OFF[name], *OFF_BACKWARD) for option in off.split()}
    assert tried | {"low_precision_states", "split_backward", "replay"} == set(get_variant(name).options)
