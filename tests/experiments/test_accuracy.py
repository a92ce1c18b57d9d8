"""The part of a call that truth is computed for must be what the full call contains."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.accuracy import Error, Part, Truth, leaves_of
from experiments.inputs import make_inputs
from experiments.shapes import Shape
from ssd import ssd_chunk_scan

SHAPE = Shape("test", batch=2, seqlen=70, nheads=6, headdim=8, dstate=16, ngroups=3)


@pytest.fixture(params=[False, True], ids=["bare", "gated"])
def setting(request):
    inputs = make_inputs(replace(SHAPE, gated=request.param), torch.float32, "cpu", requires_grad=True)
    truth = Truth(inputs, torch.randn_like(inputs["x"]), Part(batch=1, tokens=40, nheads=2, ngroups=1))
    return inputs, truth, partial(ssd_chunk_scan, chunk_size=16, variant="torch")


def test_a_right_call_agrees_on_the_part(setting):
    inputs, truth, scan = setting
    assert truth.out_error(partial(scan, **inputs)).rms < 1e-5
    errors = truth.grad_errors(partial(scan, **inputs), list(leaves_of(inputs).values()))
    assert errors.keys() == leaves_of(inputs).keys()
    assert Error.worst(list(errors.values())).rms < 1e-5


def test_a_wrong_call_does_not(setting):
    inputs, truth, scan = setting
    wrong = partial(scan, **inputs | {"A": inputs["A"] * 1.1})
    assert truth.out_error(wrong).rms > 1e-3
    errors = truth.grad_errors(wrong, list(leaves_of(inputs).values()))
    assert min(errors[name].rms for name in ("x", "dt", "B", "C")) > 1e-3


def test_worst_keeps_not_a_number():
    worst = Error.worst([Error(1.0, 5.0), Error(float("nan"), 2.0), Error(3.0, 4.0)])
    assert worst.rms != worst.rms and worst.max == 5.0
