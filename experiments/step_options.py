"""What a training step is made of, taken apart: capture, torch.compile, kept activations and the optimizer's kernel, each
changed alone.

Rows (`bench` = step_ablate) of one sitting: the step as it is, and with one thing changed. Each is another model, so these are
timed one after the other, and the variants of each side by side.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from . import record
from .parallel import make_single
from .step_graph import find_refusal
from .step_time import Candidate, measure_steps
from .table import render_lines, write_head, write_number
from .terminal import first_line
from .training_run import Run

AS_IT_IS = "as it is"
_tenths, _whole = write_number(1), write_number(0)
_HEAD = write_head("GPU | workload | preset | variant | batch | changed | step, ms | times as long | host, ms | idle, % | MiB",
                   "GPU", "workload", "preset", "variant", "changed")


class Change(NamedTuple):
    """A step that is timed: of a run, captured or not, its optimizer in one kernel or not."""

    run: Run
    graph: bool
    fused: bool = True


def list_changes(run: Run, graph: bool) -> dict[str, Change]:
    """By what is changed."""
    changes = {
        AS_IT_IS: Change(run, graph),
        "launched kernel by kernel" if graph else "captured": Change(run, not graph),
        "layers not compiled" if run.compile else "layers compiled": Change(replace(run, compile=not run.compile), graph),
        "activations kept" if run.checkpoint_activations else "activations computed again":
            Change(replace(run, checkpoint_activations=not run.checkpoint_activations), graph),
    }
    if run.optimizer == "adamw":
        changes["optimizer not in one kernel"] = Change(run, graph, fused=False)
    return changes


def time_changes(run: Run, variants: Iterable[str], graph: bool, repeats: int, warmup: int, out: Path, done: list[dict],
                 console: Console) -> list[str]:
    """Appends a row for each change and variant, unless all have theirs in `done`; returns what could not run, a line each.

    A change that cannot be captured is left out.
    """
    runs, failed = {Candidate(name): replace(run, variant=name) for name in variants}, []
    before = {(row["variant"], record.settings(row, "compile", "checkpoint_activations"))
              for row in record.read(done, bench="step_ablate", changed=AS_IT_IS)}
    if all((one.variant, record.settings({"run": asdict(one)}, "compile", "checkpoint_activations")) in before
           for one in runs.values()):
        return []
    sitting = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for changed, change in list_changes(run, graph).items():
        beside = [replace(change.run, variant=candidate.variant) for candidate in runs]
        refusal = find_refusal(beside, make_single()) if change.graph else None
        console.print(f"{run.workload} {run.preset}: {changed}{f', left out: {refusal}' if refusal else ''}", style="dim",
                      markup=False)
        if refusal:
            continue
        try:
            found = measure_steps(change.run, [*runs], repeats, warmup, console, change.graph, change.fused)
        except Exception as reason:  # must not cost the measurements of the others
            failed.append(f"{run.workload} {run.preset}, {changed}: {first_line(reason)}")
            continue
        for candidate, values in found.items():
            if "note" in values:
                failed.append(f"{run.workload} {run.preset} {candidate.variant}, {changed}: {values['note']}")
            else:
                identity = replace(change.run, variant=candidate.variant).identity(candidate.options)
                record.add([{"bench": "step_ablate", "changed": changed, **identity, **values, "sitting": sitting}], out)
    return failed


def tabulate(rows: list[dict]) -> str:
    """Markdown of the last sitting of each workload and variant on each GPU, losses beside wins."""
    lines = []
    kinds = record.group_by(rows, lambda row: (row["gpu"], record.settings(row, "compile", "checkpoint_activations")))
    for of_kind in kinds.values():
        group = [row for row in of_kind if row["sitting"] == of_kind[-1]["sitting"]]
        whole = next((row for row in group if row["changed"] == AS_IT_IS), None)
        for row in group if whole else ():  # what could not run as it is has nothing to be compared with
            settings = (row["run"][name] for name in ("workload", "preset", "variant", "batch"))
            lines.append([row["gpu"], *settings, row["changed"], _tenths(row["p50_us"] / 1e3),
                          f"{row['p50_us'] / whole['p50_us']:.2f}", _tenths(row["host_us"] / 1e3),
                          _whole(row["idle_pct"]), _whole(row["peak_mib"])])
    return _HEAD + render_lines(lines) if lines else (
        "No rows yet: no GPU has run `make ablate WORKLOAD=... ARGS=--each-step-option` for this table.\n")
