"""A whole run: batches to workers, failures made small, a table, and a row."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from textwrap import shorten

import torch
from rich.console import Console
from rich.table import Table

from .. import record
from ..terminal import make_empty_table
from . import worker
from .parts import DRAWS, from_json, label, to_json
from .pool import Batch, Pool
from .shrink import shrink
from .trial import Outcome

_EVERY = 20.0  # seconds between lines of progress
_SHRUNK = 5  # failures that are made small
_LONGEST_TABLE = 7  # failures in it
_WIDEST = 400  # characters of a configuration in it
_SHOWN = 150  # characters of one in the summary


@dataclass(frozen=True)
class Plan:
    """What a run is of.

    Attributes:
        seconds: after which no more is counted; configs: how many are drawn, of which all run, the slow ones too.
        family: configurations that share their kernels.
        timeout: seconds that one configuration may take.
        shrinking: seconds for making failures small.
    """

    part: str
    variants: tuple[str, ...]
    seed: int
    seconds: float
    configs: int
    workers: int
    family: int
    timeout: float
    shrinking: float
    out: Path
    main: Callable = worker.main  # of each worker


@dataclass
class Tally:
    """What a run has found so far."""

    statuses: Counter = field(default_factory=Counter)
    variants: Counter = field(default_factory=Counter)
    modes: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    failures: list[tuple[str, Outcome]] = field(default_factory=list)
    closest: tuple[float, str] = (0.0, "")
    replays: int = 0
    slowest: tuple[float, str] = (0.0, "")

    def add(self, line: str, outcome: Outcome) -> None:
        self.statuses[outcome.status] += 1
        if outcome.status in ("refused", "skipped"):
            self.reasons[f"{outcome.status}: {outcome.why[:100]}"] += 1
            return
        config = from_json(line)
        self.variants[label(config)] += 1
        self.modes[config.mode] += 1
        self.replays += outcome.replays
        self.slowest = max(self.slowest, (outcome.seconds, line))
        if outcome.failed:
            self.failures.append((line, outcome))
        else:
            self.closest = max(self.closest, (outcome.ratio, outcome.why))

    @property
    def configs(self) -> int:
        """Those that ran: others count for nothing."""
        return self.statuses["passed"] + self.statuses["failed"]


def run(plan: Plan, console: Console) -> Tally:
    """Draws, runs and judges until the time is up or configurations are enough; prints what failed and a table last.

    On a GPU a row is added to <out>/<gpu>/fuzz.jsonl.
    """
    started, tally = time.monotonic(), Tally()

    def over() -> bool:
        return time.monotonic() - started >= plan.seconds

    def draws() -> Iterator[Batch]:
        device, draw = "cuda" if torch.cuda.is_available() else "cpu", DRAWS[plan.part]
        for index in range(ceil(plan.configs / plan.family)):
            yield [to_json(c) for c in draw(plan.seed, index, list(plan.variants), device, plan.family)]

    with Pool(plan.workers, plan.timeout, plan.main) as pool:
        _follow(pool, draws(), tally, over, started, console)
        seconds = round(time.monotonic() - started, 1)
        ended = "seconds" if over() else "configs"
        shrunk = _shrink_failures(pool, tally.failures, plan.shrinking, console)
    console.print(_make_table(plan, tally, seconds, ended, pool.replaced))
    _print_failures(shrunk, console)
    if torch.cuda.is_available():
        path = record.append(make_row(plan, tally, seconds, shrunk), plan.out)
        console.print(f"row added to {path}", markup=False, soft_wrap=True)
    return tally


def make_row(plan: Plan, tally: Tally, seconds: float, failed: list[tuple[str, str]]) -> dict:
    """What is recorded of a run. failed: configurations, and why."""
    return {"bench": "fuzz", "part": plan.part, "configs": tally.configs, "failures": len(tally.failures), "seconds": seconds,
            "seed": plan.seed, "family": plan.family, "variants": dict(tally.variants), "modes": dict(tally.modes),
            "failed": [{"config": json.loads(line), "why": why} for line, why in failed],
            "closest": round(tally.closest[0], 3), **record.environment()}


def rerun(lines: list[str], plan: Plan, console: Console) -> bool:
    """Runs given configurations, makes those small that fail, and says whether none did."""
    tally = Tally()
    with Pool(min(plan.workers, len(lines)), plan.timeout, plan.main) as pool:
        for line, outcome in pool.run([line] for line in lines):
            tally.add(line, outcome)
            said = f"{outcome.status} in {outcome.seconds:.1f} s, {outcome.ratio:.2f} of a bound: {line}\n{outcome.why}"
            console.print(said, markup=False, soft_wrap=True)
        if tally.failures:
            _print_failures(_shrink_failures(pool, tally.failures, plan.shrinking, console), console)
    return not tally.failures


def _follow(pool: Pool, batches: Iterator[Batch], tally: Tally, over: Callable[[], bool], started: float,
            console: Console) -> None:
    """Adds up what comes, says each failure when it comes, and how far it is now and then."""
    said = started
    for line, outcome in pool.run(batches, over):
        tally.add(line, outcome)
        if outcome.failed:
            console.print(f"FAILED {line}\n  {outcome.why}", style="red", markup=False, soft_wrap=True)
        if time.monotonic() - said >= _EVERY:
            said = time.monotonic()
            console.print(f"{said - started:.0f} s: {tally.configs} configurations, {len(tally.failures)} failed", markup=False)


def _shrink_failures(pool: Pool, failures: list[tuple[str, Outcome]], seconds: float,
                     console: Console) -> list[tuple[str, str]]:
    """The failing configurations and why, the first few made small: each may take half of the time that is left."""
    found, end = [], time.monotonic() + seconds
    for n, (line, outcome) in enumerate(failures):
        if n < _SHRUNK and (left := end - time.monotonic()) > 0:
            line, outcome = _find_smallest(pool, line, outcome, left / 2)
            console.print(f"shrunk to {line}", markup=False, soft_wrap=True)
        found.append((line, outcome.why.splitlines()[0] if outcome.why else ""))
    return found


def _find_smallest(pool: Pool, line: str, outcome: Outcome, seconds: float) -> tuple[str, Outcome]:
    """A small configuration that fails as well, and how, tried out in workers, which may die of it."""
    outcomes, end = {line: outcome}, time.monotonic() + seconds

    def over() -> bool:
        return time.monotonic() > end

    def find_failing(configs: list) -> list[bool]:
        lines = [to_json(c) for c in configs]
        outcomes.update(pool.run(([line] for line in lines if line not in outcomes), over))
        return [line in outcomes and outcomes[line].failed for line in lines]

    small = to_json(shrink(from_json(line), find_failing, over, pool.width))
    return small, outcomes[small]


def _make_table(plan: Plan, tally: Tally, seconds: float, ended: str, replaced: int) -> Table:
    table = make_empty_table("fuzz", plan.part)

    def counts(counter: Counter) -> str:
        return ", ".join(f"{name} {count}" for name, count in counter.most_common(8)) or "none"

    for name, value in (
        ("configurations", f"{tally.configs} in {seconds:.0f} s, seed {plan.seed}; ended by --{ended}"),
        ("failed", str(len(tally.failures))), ("variants", counts(tally.variants)), ("modes", counts(tally.modes)),
        ("launches replayed in", str(tally.replays)), ("not counted", counts(tally.reasons)),
        ("workers replaced", str(replaced)),
        ("nearest to its bound", f"{tally.closest[0]:.2f} of it: {shorten(tally.closest[1], _SHOWN)}"),
        ("slowest", f"{tally.slowest[0]:.1f} s: {shorten(tally.slowest[1], _SHOWN)}"),
    ):
        table.add_row(name, value)
    return table


def _print_failures(failed: list[tuple[str, str]], console: Console) -> None:
    for line, why in failed[:_LONGEST_TABLE]:
        console.print(f"{why[:_WIDEST]}\n  {line}", style="red", markup=False, soft_wrap=True)
    if len(failed) > _LONGEST_TABLE:
        console.print(f"and {len(failed) - _LONGEST_TABLE} more, above", style="red")
