"""Workloads with one variant after another inside them: how long a step takes, the state-space model's part, what is learnt.

Two rows for each: of the bench `step` its time, taken side by side with the other variants' in one model, and of the bench
`train` its loss after a number of steps from the same start. What has its row is not run again, so a sweep that was killed goes
on where it stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from ssd import Options
from ssd.registry import get_variant, is_peer

from . import ablate, checkpoints, record
from .reasons import first_line
from .runs import Run
from .step_time import Candidate, measure
from .train import Interrupted, train


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        runs: a workload each, with any variant.
        variants: to put inside.
        each_option: also measure steps of every variant without each of its options.
        repeats, warmup: steps of each that are timed, and before.
        folder: of the training runs' own folders.
        out: of the rows.
        again: run what has its row, too.
    """

    runs: tuple[Run, ...]
    variants: tuple[str, ...]
    each_option: bool = False
    repeats: int = 20
    warmup: int = 3
    folder: Path = Path("runs")
    out: Path = record.RESULTS
    again: bool = False


def parsed(text: str) -> tuple[str, str, str | None]:
    """NAME[:PRESET][/MIXER] to the three; the preset is tiny unless given."""
    text, _, mixer = text.strip().partition("/")
    name, _, preset = text.partition(":")
    return name, preset or "tiny", mixer or None


def run(plan: Plan, console: Console) -> list[str]:
    """Runs the plan and returns what failed, a line each; the rest goes on.

    Raises:
        Interrupted: by a signal, after the run in progress was saved; the same plan goes on with it.
    """
    failed = []
    for base in plan.runs:
        where = f"{base.workload} {base.preset} {base.mixer}"
        variants = [name for name in plan.variants if _is_built(base, name, failed)]
        try:
            _time_steps(plan, base, variants, console, failed)
        except Exception as reason:  # must not cost the measurements of the others
            failed.append(f"{where}: {first_line(reason)}")
        for name in variants:
            one = replace(base, variant=name)
            if _has_row(plan, "train", one, None):
                console.print(f"{where} {name}: trained before", style="dim")
                continue
            out = plan.folder / f"sweep-{base.workload}-{base.preset}-{base.mixer}-{name}-{base.seed}"
            goes_on = checkpoints.latest(out / "checkpoints") is not None and not plan.again
            if not goes_on and out.exists():  # of a run that was killed, or has its row
                shutil.rmtree(out)
            try:
                train(one, out, console, goes_on, plan.out)
            except Interrupted:
                raise
            except Exception as reason:  # as above
                failed.append(f"{where} {name}: {first_line(reason)}")
    return failed


def committed(out: Path = record.RESULTS) -> list[dict]:
    """The last row of each step, with the loss of the last training like it, and `share` and `speedup`.

    share: of the state-space model in the step. speedup: over upstream's step of the same sitting.
    """
    losses = {(record_key(row), row["variant"]): row["loss"] for row in record.read(out, bench="train")}
    rows = record.latest(record.read(out, bench="step"), lambda row: (record_key(row), row["variant"], str(row["options"])))
    theirs = {(record_key(row), row["git_sha"]): row["p50_us"] for row in rows if row["variant"] == "mamba_ssm"}
    found = []
    for row in rows:
        rival = theirs.get((record_key(row), row["git_sha"]))
        found.append(row | {
            "mixer": row["run"]["mixer"], "loss": losses.get((record_key(row), row["variant"])),
            "share": row["ssm_us"] / row["p50_us"] if row["ssm_us"] is not None else None,
            "speedup": rival / row["p50_us"] if rival and row["variant"] != "mamba_ssm" else None,
        })
    return found


def record_key(row: dict) -> tuple:
    """What was trained, whatever the variant; how long and how often it is saved is left out."""
    settings = {name: value for name, value in row["run"].items() if name not in ("variant", "steps", "warmup", "save_every")}
    return row["gpu"], *sorted((name, str(value)) for name, value in settings.items())


def _time_steps(plan: Plan, base: Run, variants: Iterable[str], console: Console, failed: list[str]) -> None:
    candidates = [candidate for name in variants for candidate in _candidates(name, plan.each_option)]
    if all(_has_row(plan, "step", replace(base, variant=c.variant), c.options) for c in candidates):
        return  # all or none: times of two sittings do not compare
    for candidate, values in measure(base, candidates, plan.repeats, plan.warmup, console, failed).items():
        run = replace(base, variant=candidate.variant)
        row = {"bench": "step", "variant": candidate.variant, "options": _options(candidate), "batch": run.batch,
               "seqlen": run.seqlen, "dtype": run.dtype, "workload": run.workload, "preset": run.preset, **values,
               "run": asdict(run), **record.environment()}
        record.append(row, plan.out)


def _candidates(variant: str, each_option: bool) -> list[Candidate]:
    every = Candidate(variant, Options())
    if not each_option or variant == "auto" or not get_variant(variant).options:
        return [every]
    without = [step for step in ablate.steps(get_variant(variant).options) if step.step == "without"]
    return list(dict.fromkeys([every, *(Candidate(variant, step.options) for step in without)]))


def _options(candidate: Candidate) -> dict | None:
    return None if is_peer(candidate.variant) else asdict(candidate.options)


def _is_built(base: Run, variant: str, failed: list[str]) -> bool:
    """Whether a variant can be had at all."""
    try:
        if variant != "auto":
            get_variant(variant)
    except ImportError as reason:
        failed.append(f"{base.workload} {base.preset} {base.mixer} {variant}: {first_line(reason)}")
        return False
    return True


def _has_row(plan: Plan, bench: str, run: Run, options: Options | None) -> bool:
    if plan.again:
        return False
    wanted = None if options is None or is_peer(run.variant) else asdict(options)
    return any(row["run"] == asdict(run) and (options is None or row["options"] == wanted)
               for row in record.read(plan.out, bench=bench))
