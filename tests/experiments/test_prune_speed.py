"""Times of what was pruned: every part and mode leaves rows beside the whole's, by a made-up clock."""

import pytest
import torch

from experiments import record, table
from experiments.pruning import commands, speed
from ssd.modules import Mamba2
from tests.experiments.clock import install
from tests.experiments.small import small_run

pytestmark = pytest.mark.usefixtures("small")


def test_rows_of_every_part_and_mode(tmp_path, monkeypatch, console):
    """The whole takes 3 us, what was pruned 2; Mamba-1 has too few states for an eighth of them to go."""
    assert tuple(speed.MODES) == commands.PARTS
    monkeypatch.setattr(speed, "D_MODEL", 32)
    monkeypatch.setattr(speed, "Mamba2", lambda d_model, **how: Mamba2(d_model, d_state=32, headdim=16, chunk_size=16, **how))
    install(monkeypatch, lambda ratio, in_graph: 2.0 if ratio else 3.0)
    plan = speed.Plan(small_run(preset="states", batch=1), "states", (0.5,), commands.PARTS,
                      (8,), 2, 1, tmp_path)
    rows = speed.run(plan, console)
    assert record.read(tmp_path, bench="prune_speed") == rows
    made = {(row["part"], row["mode"], row["ratio"]) for row in rows}
    assert made == {(part, mode, ratio) for part, modes in speed.MODES.items() for mode in modes for ratio in (0.0, 0.5)}
    for row in rows:
        assert row["seqlen"] == (1 if row["mode"] == "decode" else 8) and row["p50_us"] > 0
        assert ("speedup" in row) == (row["ratio"] > 0) and (row["part"] == "step" or row.get("speedup", 1.5) == 1.5)
        assert row["dstate"] == {"mamba1": 16}.get(row["part"], 32) * (1 - row["ratio"])
    for whole, pruned in zip(rows[::2], rows[1::2], strict=True):
        assert pruned["parameters"] < whole["parameters"] and pruned["weights_mib"] < whole["weights_mib"]
    assert table.render(rows, "markdown", table.PRUNING_SPEED).count("\n") == 2 + len(rows)


def test_what_a_part_does_not_allow_is_left_out(tmp_path, monkeypatch, console):
    monkeypatch.setattr(speed, "D_MODEL", 32)
    install(monkeypatch, lambda ratio, in_graph: 2.0)
    plan = speed.Plan(small_run(batch=1), "states", (0.125, 0.25), ("mamba1",), (8,), 2, 1, tmp_path)
    assert {row["ratio"] for row in speed.run(plan, console)} == {0.0, 0.25}
    assert "mamba1 without 0.125 of its states is left out: ratio: got 0.125, which leaves 14" in console.export_text()


def test_a_step_that_cannot_run_costs_no_other(tmp_path, monkeypatch, console):
    original = speed.measure_steps

    def measure(run, *others):
        return original(run, *others) if run.start else {None: {"note": "out of memory"}}

    monkeypatch.setattr(speed, "measure_steps", measure)
    plan = speed.Plan(small_run(preset="states", batch=1), "states", (0.3, 0.5), ("step",), (8,), 2, 1, tmp_path)
    (row,) = speed.run(plan, console)
    assert row["ratio"] == 0.5 and "speedup" not in row and row["graph"] == torch.cuda.is_available()
    said = console.export_text()
    assert "step 8 without 0.0 of its states is left out: out of memory" in said and "step 8 without 0.3 of its states" in said
