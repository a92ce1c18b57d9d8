"""Classes of kernels, from counters and from the cost model, and their shares of time."""

import pytest

from experiments.characterize import classes
from experiments.characterize.classes import BOTH, TENSOR, UNKNOWN, VECTOR, Work
from tests.experiments.rows import kernel_row

COUNTED = {"tensor_flops": 990.0, "fadds": 2.0, "fmuls": 2.0, "ffmas": 3.0}  # 10 of 1000 on the vector units


@pytest.mark.parametrize("tensor, vector, threshold, expected", [
    (990, 10, 0.01, TENSOR), (990, 10, 0.009, BOTH), (10, 990, 0.01, VECTOR), (10, 990, 0.009, BOTH), (5, 5, 0.1, BOTH),
    (5, 0, 0.0, TENSOR), (0, 5, 0.0, VECTOR), (0, 0, 0.0, UNKNOWN)])
def test_class(tensor, vector, threshold, expected):
    assert Work(tensor, vector, "counters").uses(threshold) == expected


def test_counters_come_before_the_cost_model():
    counted, modelled = classes.work(kernel_row(**COUNTED)), classes.work(kernel_row())
    assert (counted.tensor, counted.vector, counted.ratio, counted.source) == (990.0, 10.0, 99.0, "counters")
    # per token and head: 2 P (N + pairs) over 3 (pairs + P), at 128 pairs: nothing skipped in a tile of 128
    assert modelled.ratio == pytest.approx(2 * 64 * (128 + 128) / (3 * (128 + 64))) and modelled.source == "cost model"
    assert classes.work(kernel_row("hopper_scan_kernel")).source is None


def test_shares_of_a_forward():
    times = {"chunk_cumsum": 5.0, "chunk_state": 20.0, "state_passing": 15.0, "bmm_chunk": 10.0, "chunk_scan": 50.0}
    kernels = [kernel_row(f"{name}_kernel", ncu_us=us) for name, us in times.items()]
    assert classes.compute_shares(kernels, 0.003) == {TENSOR: (1, 10.0), VECTOR: (2, 20.0), BOTH: (2, 70.0), UNKNOWN: (0, 0.0)}
    assert classes.compute_shares(kernels, 0.01)[TENSOR] == (2, 30.0), "chunk_state's x times weights is 0.4 % of its FLOPs"
    assert classes.compute_shares(kernels, recomputed=False)[BOTH] == (1, 100.0)
    assert classes.compute_shares([])[BOTH] == (0, 0.0)
