"""A step taken apart: each setting changed alone."""

from io import StringIO

import pytest
from rich.console import Console

from experiments import record, step_options
from tests.experiments.small import small_run
from tests.experiments.test_train import QUIET

pytestmark = pytest.mark.usefixtures("small")


def test_each_setting_changes_alone():
    run = small_run()
    changes = step_options.list_changes(run, graph=True)
    whole = changes.pop(step_options.AS_IT_IS)
    assert whole == (run, True, True)
    assert [sum(a != b for a, b in zip(change, whole, strict=True)) for change in changes.values()] == [1] * 4
    back = {said for name, change in changes.items() for said in step_options.list_changes(change.run, change.graph)}
    assert {"captured", "layers not compiled", "activations kept"} <= back
    assert "optimizer not in one kernel" not in step_options.list_changes(small_run(optimizer="lamb"), graph=True)


def test_rows_and_their_table(tmp_path, monkeypatch):
    """Without a GPU: nothing can be captured, and that is said."""
    timed, said = step_options.list_changes, StringIO()

    def without_compiling(run, graph):
        return {name: change for name, change in timed(run, graph).items() if not change.run.compile}

    monkeypatch.setattr(step_options, "list_changes", without_compiling)
    failed = step_options.time_changes(small_run(), ["torch"], False, 2, 1, tmp_path, [], Console(file=said))
    assert not failed and "captured, left out: a CUDA graph needs a GPU" in said.getvalue()
    rows = record.read(tmp_path)
    assert not step_options.time_changes(small_run(), ["torch"], False, 2, 1, tmp_path, rows, QUIET)
    assert len(record.read(tmp_path)) == len(rows), "what has its rows is not timed again"
    assert [row["changed"] for row in rows] == ["as it is", "activations computed again", "optimizer not in one kernel"]
    rows = [row | {"gpu": "NVIDIA H200", "idle_pct": 50.0, "peak_mib": 100.0, "p50_us": us}
            for row, us in zip(rows, (2e3, 3e3, 1e3), strict=True)]
    older = [row | {"sitting": "2020"} for row in rows]
    text = step_options.tabulate(older + rows)
    assert [line.split(" | ")[5:8] for line in text.splitlines()[2:]] == [
        ["as it is", "2.0", "1.00"], ["activations computed again", "3.0", "1.50"],
        ["optimizer not in one kernel", "1.0", "0.50"]]
    assert step_options.tabulate([]).startswith("No rows yet") and step_options.tabulate(rows[1:]).startswith("No rows yet")
