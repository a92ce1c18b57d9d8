"""Every optimisation of the variant, switched off: alone, and with those that only then have an effect."""

from dataclasses import replace

import pytest
import torch

from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import assert_forward_right, assert_right
from tests.inputs import EVERYTHING, Case, Shape, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if GPU else torch.float16
SHAPE = Shape(1, 1000, 8, 64, 2, 128, 256) if GPU else Shape(1, 150, 2, 20, 1, 40, 128)
CASES = {
    "everything": replace(EVERYTHING, documents="varlen"),
    "strong_decay": Case(strong_decay=True, D="h", initial_states=True),
}
OFF = (
    ("exp2",),
    ("fuse_bmm",),
    ("fuse_bmm", "low_precision_CB"),
    ("fuse_states",),
    ("save_states", "gluon"),
    ("two_level",),
    ("two_level", "exp2"),
    ("two_level", "causal_blocks"),
    ("two_level", "fuse_bmm", "causal_blocks"),
    ("two_level", "fuse_bmm", "low_precision_CB", "fuse_states"),
)
OFF_BACKWARD = (("exp2",), ("save_states",), ("fuse_backward",), ("fuse_backward", "save_states"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("off", OFF, ids="-".join)
def test_switched_off(off, case, device):
    options = Options(**dict.fromkeys(off, False))
    assert_forward_right(get_variant("fused"), random_inputs(SHAPE, CASES[case], HALF, device), options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("off", OFF_BACKWARD, ids="-".join)
def test_gradients_with_it_off(off, case, device):
    options, fused = Options(**dict.fromkeys(off, False)), get_variant("fused")
    switched = replace(fused, forward=lambda inputs, _, save: fused.forward(inputs, options, save))
    assert_right(switched, random_inputs(SHAPE, CASES[case], HALF, device))


def test_every_option_is_tried():
    """Elsewhere: `low_precision_states` is a matter of `state_dtype`, which the public function sees to; split_backward and
    replay have tests of their own.
    """
    tried = {name for off in (*OFF, *OFF_BACKWARD) for name in off}
    assert tried | {"low_precision_states", "split_backward", "replay"} == set(get_variant("fused").options)
