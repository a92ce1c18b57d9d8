"""Workloads with one variant after another inside them: how long a step takes, the state-space model's part, what is learnt.

Two rows for each: of the bench `step` its time, taken side by side with the other variants' in one model, and of the bench
`train` its loss after a number of steps from the same start. What has its row is not run again, so a sweep that was killed goes
on where it stopped.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from ssd import Options
from ssd.registry import get_variant, is_peer

from . import ablate, checkpoints, record, step_graph, step_options
from .autotuned_configs import compile_together
from .characterize.collect import append_counts
from .characterize.definitions import percent_of_peak
from .characterize.gpus import find
from .kernel_names import UNKNOWN, is_of_operator, list_ours
from .parallel import make_single
from .step_time import Candidate, measure_steps
from .terminal import first_line
from .train import Interrupted, train
from .training_run import Run


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        runs: a workload each, with any variant.
        variants: to put inside.
        each_option: also measure steps of every variant without each of its options.
        each_step_option: also measure steps with each setting of `step_options` changed.
        repeats, warmup: steps of each that are timed, and before.
        folder: of the training runs' own folders.
        out: of the rows.
        again: run what has its row, too.
        trains: also train with each variant; else only steps are timed.
        counts: also count bytes of the state-space model's kernels in a step, with ncu: a start of the model for each variant.
        graph: replay steps as CUDA graphs; None: of workloads where those with every variant can be.
    """

    runs: tuple[Run, ...]
    variants: tuple[str, ...]
    each_option: bool = False
    repeats: int = 20
    warmup: int = 3
    folder: Path = Path("runs")
    out: Path = record.RESULTS
    again: bool = False
    trains: bool = True
    counts: bool = False
    graph: bool | None = False
    each_step_option: bool = False


@compile_together()
def run(plan: Plan, console: Console) -> list[str]:
    """Runs the plan and returns what failed, a line each; the rest goes on.

    Raises:
        Interrupted: by a signal, after the run in progress was saved; the same plan goes on with it.
    """
    failed, gpu = [], record.environment()["gpu"]
    done = [] if plan.again else [row for row in record.read(plan.out) if row["gpu"] == gpu]
    for base in plan.runs:
        where = f"{base.workload} {base.preset} {base.mixer}"
        candidates = [candidate for name in plan.variants for candidate in _list_candidates(name, plan.each_option)]
        graph, refusal = plan.graph, None
        if graph is None:
            beside = [replace(base, variant=name) for name in plan.variants]
            refusal = step_graph.find_refusal(beside, make_single())
            graph = step_graph.choose(None, beside, make_single(), console)
        try:
            for candidate, note in _time_steps(replace(plan, graph=graph), base, candidates, done, refusal, console):
                failed.append(f"{where} {candidate.variant}: {note}")
        except Exception as reason:  # must not cost the measurements of the others
            failed.append(f"{where}: {first_line(reason)}")
        if plan.each_step_option:
            failed += step_options.time_changes(base, plan.variants, graph, plan.repeats, plan.warmup, plan.out, done, console)
        for name in plan.variants if plan.counts else ():
            one = replace(base, variant=name)
            if _find_rows(done, "ssm_counters", one) or _find_rows(done, "step_counters", one):
                console.print(f"{where} {name}: counted before", style="dim")
                continue
            if name in UNKNOWN:
                console.print(f"{where} {name}: not counted, none of its kernels is known by name", style="yellow")
                continue
            try:
                append_counts(one, plan.out, whole=False)
            except (OSError, ValueError) as reason:
                failed.append(f"{where} {name}: ncu gave none: {first_line(reason)}")
        for name in plan.variants if plan.trains else ():
            one = replace(base, variant=name)
            if _find_rows(done, "train", one):
                console.print(f"{where} {name}: trained before", style="dim")
                continue
            out = plan.folder / _name_folder(one)
            goes_on = checkpoints.latest(out / "checkpoints") is not None and not plan.again
            if not goes_on and out.exists():  # of a run that was killed, or has its row
                shutil.rmtree(out)
            try:
                train(one, out, console, goes_on, plan.out, graph=graph)
            except Interrupted:
                raise
            except Exception as reason:  # as above
                failed.append(f"{where} {name}: {first_line(reason)}")
    return failed


def read_latest(out: Path = record.RESULTS) -> list[dict]:
    """The last row of each step, with the loss of the last training with the same settings, and `share`, `speedup`, `U`, `W`,
    `G` and `dram_bytes`; of a step that was timed beside others the last such row.

    share: of the state-space model in the step. without_ssm_us: the step without it, the least that any of its kernels could
    make of it; of captured steps alone, since others wait for the host all the same. speedup: over upstream's step of the same
    sitting. U, W, G: of the memory's data-sheet rate by the state-space model's kernels, see `characterize.definitions`, where
    --counters, of a sweep or of `characterize`, counted them, at whichever commit. The time of G is theirs in the timed step:
    what lies between them there is others' work.
    """
    losses = {_identify_training(row): row["loss"] for row in record.read(out, bench="train") if row["gpus"] == 1}
    rows = [row for row in record.read(out, bench="step") if row["p50_us"] is not None]
    rows = record.latest(_drop_alone(rows), _identify_step)
    counted = _keep_last_counts(record.read(out, bench="step_counters") + record.read(out, bench="ssm_counters"))
    theirs = {_identify_sitting(row): row["p50_us"] for row in rows if row["variant"] == "mamba_ssm"}
    found = []
    for row in rows:
        rival = theirs.get(_identify_sitting(row))
        found.append(row | {
            "mixer": row["run"]["mixer"], "compile": row["run"].get("compile") or None,
            "loss": losses.get(_identify_training(row)) if record.has_default_options(row) else None,
            "share": row["ssm_us"] / row["p50_us"] if row["ssm_us"] is not None else None,
            "without_ssm_us": row["p50_us"] - row["ssm_us"] if row.get("graph") and row["ssm_us"] is not None else None,
            "speedup": rival / row["p50_us"] if rival and row["variant"] != "mamba_ssm" else None,
            **_compute_utilisation(row, counted.get(_identify_counters(row), [])),
        })
    return found


def describe_way(row: dict) -> str:
    """", captured", ", compiled", both or nothing, of a row of `read_latest`."""
    return (", captured" if row.get("graph") else "") + (", compiled" if row.get("compile") else "")


def _identify_step(row: dict) -> tuple:
    return _identify_training(row), str(record.options(row)), bool(row.get("graph"))


def _drop_alone(rows: list[dict]) -> list[dict]:
    """Without those that were timed alone, of what was also timed beside others."""
    together = Counter(map(_identify_sitting, rows))
    beside = {_identify_step(row) for row in rows if together[_identify_sitting(row)] > 1}
    return [row for row in rows if together[_identify_sitting(row)] > 1 or _identify_step(row) not in beside]


def _keep_last_counts(rows: list[dict]) -> dict[tuple, list[dict]]:
    """The state-space model's kernels of each step that was counted, as it was counted last."""
    def is_of_model(row: dict) -> bool:
        return is_of_operator(row["kernel"]) and not (is_peer(row["variant"]) and row["kernel"] in list_ours())

    return {step: list(filter(is_of_model, run)) for step, run in record.keep_last_runs(rows, _identify_counters).items()}


def _identify_counters(row: dict) -> tuple:
    settings = ("workload", "preset", "mixer", "variant", "batch", "seqlen", "dtype", "documents", "accumulate",
                "checkpoint_activations", "compile")
    return row["gpu"], str(record.options(row)), row["run"].get("buckets"), *(row["run"][name] for name in settings)


def _compute_utilisation(row: dict, kernels: list[dict]) -> dict[str, float | None]:
    gpu = find(row["gpu"])
    if not kernels or gpu is None:
        return dict.fromkeys(("U", "W", "G", "dram_bytes"))
    peak, (nbytes, us) = gpu.hbm_gbps.value, ([kernel[key] for kernel in kernels] for key in ("dram_bytes", "ncu_us"))
    return {"U": mean(percent_of_peak(*one, peak) for one in zip(nbytes, us, strict=True)),
            "W": percent_of_peak(sum(nbytes), sum(us), peak),
            "G": percent_of_peak(sum(nbytes), row["ssm_us"], peak) if row["ssm_us"] else None, "dram_bytes": sum(nbytes)}


def _find_rows(rows: list[dict], bench: str, run: Run, **values: Any) -> list[dict]:
    """Of rows that were made on a GPU like this one, or like here on none."""
    return record.read_run(rows, asdict(run), bench=bench, **values)


def _identify_training(row: dict) -> tuple:
    """What a row is about: the GPU and every setting, but how often it is saved."""
    return row["gpu"], record.settings(row, "save_every")


def _identify_sitting(row: dict) -> tuple:
    """What rows of steps share that were timed side by side. Two sweeps on two GPUs of a machine may begin in one second."""
    return row["gpu"], row["sitting"], record.settings(row, "variant")


def _time_steps(plan: Plan, base: Run, candidates: list[Candidate], done: list[dict], refusal: str | None,
                console: Console) -> Iterator[tuple[Candidate, str]]:
    """Appends a row for each; yields those that could not run, and why. refusal: why one of them cannot be captured, and so
    none is.

    All or none: times of two sittings do not compare.
    """
    runs = {candidate: replace(base, variant=candidate.variant) for candidate in candidates}
    alike = [row for row in done if bool(row.get("graph")) == plan.graph]
    if all(_find_rows(alike, "step", run, options=run.identity(candidate.options)["options"])
           for candidate, run in runs.items()):
        return
    sitting = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for candidate, values in measure_steps(base, candidates, plan.repeats, plan.warmup, console, plan.graph).items():
        identity = runs[candidate].identity(candidate.options)
        record.add([{"bench": "step", **identity, "p50_us": None, "graph": plan.graph, **values, "sitting": sitting,
                     **({"not_captured": refusal} if refusal else {})}], plan.out)
        if "note" in values:
            yield candidate, values["note"]


def _name_folder(run: Run) -> str:
    settings = hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode()).hexdigest()[:8]
    return f"sweep-{run.workload}-{run.preset}-{run.mixer}-{run.variant}-{settings}"


def _list_candidates(variant: str, each_option: bool) -> list[Candidate]:
    every = Candidate(variant, Options())
    if not each_option or variant == "auto" or is_peer(variant) or not get_variant(variant).options:
        return [every]
    without = [step for step in ablate.list_steps(get_variant(variant).options) if step.step == "without"]
    return list(dict.fromkeys([every, *(Candidate(variant, step.options) for step in without)]))
