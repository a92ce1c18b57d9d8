"""The model on calls made from known constants, what is counted of calls, and how far off it is on the committed rows."""

from collections import Counter

import numpy as np
import pytest

from experiments import record
from experiments.characterize import calls, frozen, projection
from experiments.characterize.calls import Part
from experiments.characterize.gpus import GPUS
from experiments.characterize.projection import CONSTANTS, Model, Outcome, Sample
from experiments.characterize.report import projected
from experiments.shapes import SHAPES
from tests.experiments.rows import ssd_row, write

H200, B200 = GPUS["h200"], GPUS["b200"]
TRUE = Model(4000.0, (3.0, 2.0, 0.1, 0.3, 0.4, 0.5, 0.8, 1.2, 2.0))


def sample(*parts: Part, us=1.0, launches=1, shape="8b-b4", gpu="h200") -> Sample:
    return Sample(gpu, "baseline", "fwd", shape, 128, us, launches, list(parts))


def samples(shape="8b-b4") -> list[Sample]:
    """Three for each constant, whose times are what TRUE says."""
    made = [sample(Part({name: 10.0 * n}, exposed=1e7 * n, hidden=4e7), launches=n, shape=shape)
            for name in list(CONSTANTS)[1:] for n in (1, 2, 4)]
    return [one._replace(us=us) for one, us in zip(made, TRUE.predict(made).tolist(), strict=True)]


@pytest.fixture(scope="module")
def rows():
    return record.read_gpus()


@pytest.fixture(scope="module")
def committed(rows):
    return projection.read_calls(rows)


def test_a_time_by_hand():
    """4 MB take 1 us. Of 120 us of work and as many of hidden bytes, 2^(1/4) of one is left; the exposed ones are added."""
    one = sample(Part({"scan": 100.0}, exposed=40e6, hidden=480e6), Part({}, exposed=4e6), launches=2)
    assert TRUE.predict([one]) == pytest.approx(6 + 10 + 120 * 2**0.25 + 1)


def test_a_fit_finds_the_constants():
    found = projection.fit(samples(), TRUE.memory_gbps)
    assert found.constants == pytest.approx(TRUE.constants, rel=1e-4) and max(found.spreads) < 1e-3


def test_a_constant_that_no_row_has_is_open():
    found = projection.fit([one for one in samples() if "group" not in one.parts[0].work], TRUE.memory_gbps)
    assert found.constants[:-1] == pytest.approx(TRUE.constants[:-1], rel=1e-4)
    assert found.constants[-1] == 1 and found.spreads[-1] == np.inf


def test_a_constant_is_shown_with_its_error_or_as_open():
    """An error of a million per cent would be another on another machine."""
    model = Model(4000.0, (3.0,) * 9, (0.1, 66597.82, np.inf, *[0.2] * 6))
    assert [values for _, _, (values,) in projected._list_constants({"h200": model})][1:4] == [
        "3.00 ± 10 %", "3.00, open", "no call has it"]


def test_too_few_samples():
    with pytest.raises(ValueError, match="got 8 samples, expected at least 9"):
        projection.fit(samples()[:8], TRUE.memory_gbps)


def test_constants_of_another_gpu():
    """B200: 148 SMs for 132 at a clock alike; memory at the share of the data sheet's rate that the H200's copy has."""
    carried = TRUE.carry(H200, B200)
    clock = H200.clock_ghz / B200.clock_ghz
    assert carried.memory_gbps == pytest.approx(4000 * 8000 / 4800)
    assert carried.constants[0] == 3.0 and carried.constants[-1] == pytest.approx(2.0 * clock)
    assert carried.constants[4] == pytest.approx(0.4 * clock * 132 / 148)
    assert carried.constants[1] == 2.0
    assert TRUE.carry(H200, B200, 7000.0).memory_gbps == 7000


def test_errors_by_hand():
    times = ((100.0, 110.0), (10.0, 13.0), (50.0, 50.0))  # measured, predicted
    errors = projection.summarise([Outcome(sample(us=us), predicted) for us, predicted in times])
    assert errors == pytest.approx((0.1, 13 / 160, 0.3))
    assert projected.is_met(projection.Errors(0.1, 0.12, 0.35)) and not projected.is_met(projection.Errors(0.1, 0.12, 0.351))
    assert projection.find_interval([Outcome(sample(us=us), 100.0) for us in range(50, 151)]) == pytest.approx((0.55, 1.45))


def test_a_fit_sees_models_only_where_it_must():
    few, others = samples(shape="bamba-9b"), samples()
    assert projection.choose_fitted(few + others) == others
    assert projection.choose_fitted(few + others[:3]) == few + others[:3]


def test_calls_from_rows(tmp_path):
    """One GPU without a known copy, kernels that are not for Hopper, and no graph: left out."""
    write(tmp_path, ssd_row(), ssd_row(mode="fwd_bwd"), ssd_row(mode="bwd", graph_p50_us=None), ssd_row(gpu="NVIDIA H100"),
          ssd_row("persistent", "graphs"), ssd_row("persistent", launches=2), ssd_row(gpu="NVIDIA L4"))
    found = projection.read_calls(record.read_gpus(tmp_path))
    assert sorted((one.gpu, one.variant, one.us, one.launches, len(one.parts)) for one in found) == [
        ("h100", "baseline", 990.0, 5, 1), ("h200", "baseline", 990.0, 5, 1), ("h200", "persistent", 990.0, 2, 2)]
    assert projection.read_memory(record.read_gpus(tmp_path)) == {"h200": 4270.0, "h100": 4270.0}


def test_bytes_of_a_call():
    """8b-b4: inputs and outputs once, and for a backward the states of every 64 tokens."""
    problem = SHAPES["8b-b4"].problem(128, "bf16")
    x, groups, states = 2 * problem.X, 2 * problem.K, 2 * 64 * problem.state
    moved = {mode: sum(part.hidden + part.exposed for part in calls.count_hopper("persistent", mode, problem, "h200"))
             for mode in ("fwd", "fwd_train")}
    assert moved["fwd"] == pytest.approx(2 * x + 2 * groups, rel=0.1)
    assert moved["fwd_train"] - moved["fwd"] == pytest.approx(states)


def test_launches_are_counted_as_they_were_recorded(rows):
    """Of the kernels for Hopper, where rows say that they ran, since each GPU's work is dealt by the constants of today."""
    since = {"h100": "2026-11-27T14:21", "h200": "2026-11-28T09:30"}
    ours = [row for row in record.read(rows, bench="ssd") if row["variant"] in calls.HOPPER and row["mode"] in ("fwd", "bwd")
            and (row.get("ran") or "").endswith("on Hopper") and record.has_default_options(row)]
    recorded = [(row, gpu) for row in ours for gpu in since if gpu.upper() in row["gpu"] and row["time"] > since[gpu]]
    wrong = [(row["variant"], row["mode"], row["shape"]) for row, gpu in recorded
             if len(calls.count_hopper(row["variant"], row["mode"], projection.make_problem(row), gpu)) != row["launches"]]
    counted = Counter(gpu for _, gpu in recorded)
    assert min(counted[gpu] for gpu in since) >= 12 and not wrong, counted


def test_errors_across_gpus(rows, committed):
    """What the fit to one GPU says of every call on the other keeps to the limits, both ways."""
    memory = projection.read_memory(rows)
    for source, target in (("h200", "h100"), ("h100", "h200")):
        outcomes = projection.predict_across(committed, memory, source, target)
        assert len(outcomes) >= 250 and projected.is_met(projection.summarise(outcomes)), (source, target)


def test_errors_in_training_steps(rows, committed):
    """Of which no fit has seen one: sixteen on the H200, nine on an H100."""
    steps, memory = projection.read_steps(rows), projection.read_memory(rows)
    for gpu, least in (("h200", 16), ("h100", 9)):
        model = projection.fit([one for one in committed if one.gpu == gpu], memory[gpu])
        outcomes = projection.apply(model, [one for one in steps if one.gpu == gpu])
        assert len(outcomes) >= least and projected.is_met(projection.summarise(outcomes)), gpu


def test_first_predictions(committed):
    """301 us for the forward of persistent on 8b-b4, whatever the chunk size; and none for a GPU or a call without one."""
    found = frozen.compare(committed)
    forwards = [one for one in found if (one.sample.variant, one.sample.mode) == ("persistent", "fwd")]
    assert [round(one.predicted_us, 1) for one in forwards] == [301.3]
    assert {one.sample.gpu for one in found} == {"h100"} and len(found) >= 11
    assert not frozen.compare([sample(gpu="h100", shape="never")])
