"""The fit of the time model: times that the model itself gives lead back to its constants."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from rich.console import Console

from experiments import fit_times
from fused import schedule, time_model
from fused.time_model import Cut, Step, TimeModel, get_time_model
from ssd.runtime import tuning
from ssd.runtime.tables import get_tables

MODEL = get_time_model("h200")


def test_constants_of_cuts_are_found():
    names = ("segment_start", "state_pass_launch", "state_pass_step", "piece_join")
    observations = []
    for sequences, cut in product((8, 33, 99), ((128, 128), (64, 16), (64, 64), (43, 10), (32, 32))):
        def formula(model: TimeModel, sequences=sequences, cut=cut) -> float:
            return model.time_cut(model.scan_step, sequences, 128, 132, Cut(*cut))

        coefficients, rest = fit_times.find_coefficients(MODEL, names, formula)
        assert rest + sum(n * getattr(MODEL, name) for name, n in coefficients.items()) == pytest.approx(formula(MODEL))
        observations.append(({**coefficients, "overhead": 1.0}, formula(MODEL) + 5.0 - rest))
    found = fit_times.solve(observations)
    assert found == pytest.approx({name: getattr(MODEL, name) for name in names} | {"overhead": 5.0})


def test_every_choice_is_dealt_anew():
    """Tables are kept by sizes alone, so a fit would time one cut again and again."""
    settings, cuts = (1, 8, 128, 132, "h200", "scan_step", True, 1), (Cut(128, 128), Cut(64, 16), Cut(43, 10))
    before = get_tables(schedule.deal, settings, torch.device("cpu"))
    for cut in cuts:
        with fit_times._choose("fused.schedule._choose_cut", cut):
            runs = get_tables(schedule.deal, settings, torch.device("cpu")).sequences
            assert int((runs[..., 3] - runs[..., 2]).max()) == cut.each
    assert get_tables(schedule.deal, settings, torch.device("cpu")) is before


@pytest.mark.parametrize("step", (MODEL.scan_step, MODEL.every_state_step, MODEL.few_states_step))
def test_steps_are_found(step):
    assert fit_times.solve_step({blocks: step.among(blocks) for blocks in (16, 66, 132)}) == pytest.approx(step, abs=2e-3)


def test_no_constant_is_below_zero():
    """The nearest solution would have a start of -1."""
    assert fit_times.solve([({"step": 1.0, "start": 1.0}, 1.0), ({"step": 2.0, "start": 1.0}, 3.0)])["start"] == 0


def test_what_was_found_is_written(monkeypatch, tmp_path):
    """What was not measured, as the constants of Hopper on another GPU, stays."""
    monkeypatch.setattr(fit_times, "CONFIGS", tmp_path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "current_device", lambda index: tuning.Device("a new one", 232_448))
    monkeypatch.setattr(fit_times, "is_hopper", lambda device: False)
    monkeypatch.setattr(fit_times, "_fit_plain", lambda device: {"chunks_step": 0.5, "chunks_launch": 0.0})
    console = Console(width=100)
    with console.capture() as said:
        fit_times.run(console)
    assert "chunks_launch: 8 stays; the times leave nothing for it" in said.get() and "-> 0.5" in said.get()
    monkeypatch.setattr(time_model, "CONFIGS", tmp_path)
    written = get_time_model.__wrapped__("a new one")
    assert written == replace(MODEL, chunks_step=0.5) and isinstance(written.scan_step, Step)
