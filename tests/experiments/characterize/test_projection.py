"""The algebra of the projection on samples made from known coefficients, and the samples that rows give."""

from dataclasses import replace

import pytest

from experiments.characterize import projection
from experiments.characterize.gpus import GPUS
from experiments.characterize.projection import Model, Sample
from ssd import cost
from tests.experiments.rows import kernel_row, ssd_row, write

H200, B200 = GPUS["h200"], GPUS["b200"]
TRUE = Model((5.0, 1.25, 0.5, 2.0, 0.0), H200)


def sample(what="a", us=0.0, shape="s", launches=1, **work) -> Sample:
    return Sample(what, shape, "fwd", 128, us, launches, cost.Cost(**work))


def samples() -> list[Sample]:
    """Twelve of three kernels and four shapes, whose times are what TRUE says."""
    made = []
    for n in range(1, 5):
        for what, work in (("a", {"bytes": 1e9 * n, "flops": 3e11 / n, "vector": 1e9, "exps": 1e8 * n * n}),
                           ("b", {"bytes": 2e8, "flops": 1e11 * n * n, "vector": 2e9 * n, "exps": 1e7}),
                           ("c", {"bytes": 1e8 / n, "flops": 2e10, "vector": 3e9, "exps": 2e8 * n})):
            one = sample(what, shape=f"s{n}", launches=n, **work)
            made.append(sample(what, TRUE.us(one), f"s{n}", n, **work))
    return made


def test_terms_by_hand():
    """4.8 GB at 4.8 TB/s, 989 GFLOP at 989 TFLOP/s, 66.9 at 66.9: a millisecond each."""
    terms = sample(launches=3, bytes=4.8e9, flops=989e9, vector=66.9e9, exps=16 * 132 * 1.98e6).terms_us(H200)
    assert terms == pytest.approx((3, 1000, 1000, 1000, 1000), rel=1e-3)


def test_a_fit_finds_the_coefficients():
    assert projection.fit(samples(), H200).coefficients == pytest.approx(TRUE.coefficients, abs=1e-6)


def test_coefficients_are_not_negative():
    """Time falls as bytes rise: unbounded, the bytes' coefficient would be below 0."""
    falling = [sample(us=100.0 - n, bytes=1e6 * n, launches=1) for n in range(1, 8)]
    assert min(projection.fit(falling, H200).coefficients) >= 0


def test_what_is_left_out_is_not_known_to_the_fit():
    *others, last = samples()
    left = projection.leave_out([*others, replace(last, what="odd", us=10 * last.us)], H200, lambda one: one.what)
    assert left[-1].error == pytest.approx(-0.9, abs=1e-6), "predicted by the others, as if it were one of them"
    assert projection.summarise(projection.leave_out(samples(), H200, lambda one: one.shape)).largest < 1e-6


def test_projection_is_exact_for_what_the_model_knows():
    one = samples()[0]
    assert TRUE.project_us(one, H200) == pytest.approx(one.us)
    assert TRUE.project_us(one, B200) == pytest.approx(TRUE.us(one, B200))
    bytes_alone = sample(us=100.0, launches=0, bytes=4.8e8)
    assert TRUE.project_us(bytes_alone, B200) == pytest.approx(100.0 * 4800 / 8000)
    assert sum(TRUE.parts_us(one).values()) == pytest.approx(one.us)


def test_too_few_samples():
    with pytest.raises(ValueError, match="got 4 samples, expected at least 5"):
        projection.fit(samples()[:4], H200)


def test_samples_from_rows(tmp_path):
    write(tmp_path, kernel_row("chunk_state_kernel"), kernel_row("hopper_scan_kernel"), kernel_row(variant="fused"),
          ssd_row(), ssd_row(mode="fwd_bwd"), ssd_row("fused"), ssd_row(mode="bwd", graph_p50_us=None))
    kernels, gpu = projection.read_kernel_samples(tmp_path)
    assert [(one.what, one.us, one.work.bytes) for one in kernels] == [("chunk_state", 20.0, 48e6)] and gpu is H200
    (call,), gpu = projection.read_call_samples(tmp_path)
    assert (call.mode, call.us, call.launches) == ("fwd", 990.0, 5) and gpu is H200
    assert projection.read_kernel_samples(tmp_path / "none") == ([], None)


def test_rows_of_two_gpus_are_not_mixed(tmp_path):
    write(tmp_path, ssd_row(), ssd_row(gpu="NVIDIA H100"), ssd_row(mode="bwd", gpu="NVIDIA H100"))
    calls, gpu = projection.read_call_samples(tmp_path)
    assert len(calls) == 2 and gpu is GPUS["h100"]
