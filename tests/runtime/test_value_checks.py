"""SSD_CHECK=1: values that are not finite, and A > 0, are refused by name where they come from."""

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.runtime import value_checks
from tests.inputs import EVERYTHING, Shape, arguments, random_inputs

SHAPE = Shape(2, 20, 4, 8, 2, 16, 16)


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(value_checks, "ENABLED", True)
    good = arguments(random_inputs(SHAPE, EVERYTHING, device="cpu"))
    return lambda **changed: ssd_chunk_scan(**good | changed, variant="torch")


def test_good_values_pass(call):
    assert call().isfinite().all()


@pytest.mark.parametrize("name, shape, at", [("x", (2, 20, 4, 8), (1, 3, 2, 5)), ("dt", (2, 20, 4), (0, 7, 1)),
                                             ("dt_bias", (4,), (2,))])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_named(call, name, shape, at, value):
    t = torch.zeros(shape)
    t[at] = value
    with pytest.raises(ValueError, match=rf"^{name}: got {value} at .*, and 1 of {t.numel()} values that are not finite"):
        call(**{name: t})


def test_a_rate_above_zero_is_named(call):
    with pytest.raises(ValueError, match=r"^A: got 0.5 for head 2, expected at most 0"):
        call(A=torch.tensor([-1.0, 0.0, 0.5, -1.0]))


def test_an_output_beyond_its_dtype_is_named(call):
    """Finite inputs whose products fp16 cannot hold."""
    x = torch.full((2, 20, 4, 8), 6e4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^out: got -?inf at .*expected a finite output, within the range of torch.float16"):
        call(x=x, D=torch.full((4,), 2.0), z=None)


def test_a_gradient_that_is_not_finite_is_named(call):
    x = torch.randn(2, 20, 4, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"^dx: got (nan|-?inf) at"):
        call(x=x, D=torch.full((4,), 2.0), z=None).backward(torch.full((2, 20, 4, 8), 3e38))


def test_a_gradient_that_comes_in_is_not_blamed_on_the_call(call):
    with pytest.raises(ValueError, match=r"^dout: got nan at"):
        call(x=torch.randn(2, 20, 4, 8, requires_grad=True)).backward(torch.full((2, 20, 4, 8), float("nan")))


def test_a_check_is_of_one_backward(call):
    x, D = torch.randn(2, 20, 4, 8, requires_grad=True), torch.ones(4, requires_grad=True)
    with torch.no_grad():
        call(x=x, D=D)
    for _ in range(3):
        call(x=x, D=D).sum().backward()
    (x.sum() * float("inf")).backward()  # not of a call
    assert not x._backward_hooks and not D._backward_hooks
