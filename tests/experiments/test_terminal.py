"""Progress where there is no terminal: a line at first, and then one in ten seconds."""

from io import StringIO

import pytest
from rich.console import Console

from experiments import terminal
from experiments.train_log import TrainLog


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def console():
    return Console(file=StringIO(), width=100, force_terminal=False)


def test_track_says_the_first_item_and_then_one_in_ten_seconds(clock, console):
    for _ in terminal.track(range(5), console, lambda item: f"item {item}"):
        clock[0] += 4
    assert console.file.getvalue().splitlines() == ["1 of 5: item 0", "4 of 5: item 3"]


def test_a_training_says_how_far_it_is(clock, console, tmp_path):
    with TrainLog(tmp_path, 4, "tokens", 0, console) as log:
        for step in range(1, 4):
            log.step(step, {"loss": 3.0, "tokens_per_s": 2000.0, "peak_mib": 10.0})
            clock[0] += 6
    said = console.file.getvalue().splitlines()
    assert said[:2] == [f"step {step} of 4: loss 3.0000  2,000 tokens/s  10 MiB" for step in (1, 3)]
