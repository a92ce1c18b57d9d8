"""What variant "auto" takes beside mamba_ssm, and beside the best of ours that keeps as much for the backward.

Times are in CUDA graphs, and compare within one run of the bench alone. `make bench VARIANT=auto,fused,persistent SHAPE=models
ARGS='--also save_states=false'` measures all that is compared: "auto" keeps nothing unless it is given keep_bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from ssd import Options
from ssd.registry import list_candidates

from . import record
from .result_tables import MODES
from .shapes import find_shapes
from .table import render_lines, write_head

GROUPS = "named", "workloads", "models"
_KEEP_NOTHING = Options(), replace(Options(), save_states=False)  # what "auto" takes for the same
_APART = 3  # seconds between rows of one run, at most
_HEAD = write_head("shapes | calls | measured | least gain over mamba_ssm | in | beside ours | most over the best | in",
                   "shapes", "in")


@dataclass(frozen=True)
class Call:
    """What "auto" takes in a mode at a shape.

    Attributes:
        gain: mamba_ssm's time, at its better chunk size, over that of "auto", in the last run of both.
        over: how much longer "auto" takes than the best of ours that keeps as much, relative to it, in the last run of both;
            None if there is none.
    """

    name: str
    gain: float
    over: float | None


def read_calls(rows: Iterable[dict], group: str) -> list[Call]:
    """Of the calls of a group of shapes on one GPU, in bf16, those that "auto" was measured in beside mamba_ssm.

    rows: of the bench `ssd`, oldest first.
    """
    wanted = {shape.name for shape in find_shapes(group)}
    timed = [row for row in rows if row["shape"] in wanted and row["mode"] in MODES and row["dtype"] == "bf16"
             and row["graph_p50_us"]]
    calls = []
    for (shape, mode), of in record.group_by(timed, lambda row: (row["shape"], row["mode"])).items():
        runs = [times for run in _split_runs(of) if "auto" in (times := _find_least(run))]
        gains = [run["mamba_ssm"] / run["auto"] for run in runs if "mamba_ssm" in run]
        over = [run["auto"] / run["ours"] - 1 for run in runs if "ours" in run]
        if gains:
            calls.append(Call(f"{shape} {mode}", gains[-1], over[-1] if over else None))
    return calls


def tabulate(rows: Iterable[dict]) -> str:
    """Markdown of the call with the least gain, and of that furthest from the best of ours, in each group on each GPU."""
    parts = []
    by_gpu = record.group_by([row for row in rows if row["bench"] == "ssd"], lambda row: row["gpu"])
    for gpu, of in sorted(by_gpu.items()):
        lines = []
        for group in GROUPS:
            if calls := read_calls(of, group):
                slowest, compared = min(calls, key=lambda one: one.gain), [one for one in calls if one.over is not None]
                furthest = max(compared, key=lambda one: one.over, default=None)
                lines.append((group, len(find_shapes(group)) * len(MODES), len(calls), f"{slowest.gain:.2f}", slowest.name,
                              len(compared), *((f"{furthest.over:.1%}", furthest.name) if furthest else ("", ""))))
        if lines:
            parts.append(f"{gpu}:\n\n{_HEAD}{render_lines(lines)}")
    return "\n".join(parts) or "No rows yet: no GPU has run `make bench VARIANT=auto`.\n"


def _split_runs(rows: list[dict]) -> Iterator[list[dict]]:
    """Rows of one call, oldest first, by the run that measured them side by side."""
    run: list[dict] = []
    for row in rows:
        if run and (row["git_sha"] != run[-1]["git_sha"] or _read_time(row) - _read_time(run[-1]) > _APART):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _find_least(run: list[dict]) -> dict[str, float]:
    """The least microseconds of "auto" that keeps nothing, of mamba_ssm, and as "ours" of others of ours that keep as much."""
    found: dict[str, float] = {}
    for row in run:
        if name := _name_side(row):
            found[name] = min(found.get(name, row["graph_p50_us"]), row["graph_p50_us"])
    return found


def _name_side(row: dict) -> str | None:
    if row["variant"] == "mamba_ssm":
        return "mamba_ssm"
    default, nothing = (asdict(options) for options in _KEEP_NOTHING)
    if row["variant"] == "auto":
        return "auto" if record.options(row) in (default, nothing) else None
    keeps = record.options(row) == default and row["mode"] != "fwd"
    return "ours" if row["variant"] in list_candidates() and record.options(row) in (default, nothing) and not keeps else None


def _read_time(row: dict) -> float:
    return datetime.fromisoformat(row["time"]).timestamp()
