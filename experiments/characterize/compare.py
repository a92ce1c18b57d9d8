"""Two result sets side by side: what was measured in both, the ratio of its times, and whether that is more than noise.

The time of a row is that in a CUDA graph where both rows have one: an eager call of a small shape is the host's time, and
hosts differ by up to 3.4 times for code that did not change. Noise is the larger of two: what two runs differ by anyway,
and half the width of p20..p80 over the median, added up over both rows. Those percentiles are of eager calls; where a row's
eager median is more than a tenth above its time in a graph, they are the host's and are left out.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from .. import record, table
from .commands import NOISE

_HOST_BOUND = 1.1
_SETTINGS = ("gpu", "bench", "part", "workload", "preset", "variant", "mode", "shape", "dtype", "chunk_size", "gpus", "way")
_SHORT_SHA = 7
_NAMED = 10  # commits in an error
_COLUMNS = table.make_columns("bench", "what", "variant", "chunk", "options") | {
    "old us": ("old", table.write_microseconds), "new us": ("new", table.write_microseconds), "of": ("of", table.write_text),
    "new / old": ("ratio", table.write_number(3)), "band": ("band", lambda band: f"±{100 * band:.0f} %"),
    "verdict": ("verdict", table.write_text)}


@dataclass(frozen=True)
class Comparison:
    """Measurements that are in both sets, and how many only one of the sets has.

    Attributes:
        pairs: the slowest first; of each what was measured, `old` and `new` microseconds, and whether they are `of` graphs or
            eager calls; `ratio`, above 1 where new is slower; `band`, how far from 1 that may be by noise alone; `verdict`.
    """

    pairs: list[dict]
    only_old: int
    only_new: int

    def count(self, verdict: str) -> int:
        return Counter(pair["verdict"] for pair in self.pairs)[verdict]

    def summary(self) -> str:
        return (f"{len(self.pairs)} measured in both: {self.count('slower')} slower, {self.count('faster')} faster, "
                f"{self.count('same')} the same; {self.only_old} only in the old set, {self.only_new} only in the new")


def rows_of(name: str, out: Path = record.RESULTS) -> list[dict]:
    """Rows of a result set: a folder of them, or those under `out` that were measured at a commit; none of a slow clock.

    Raises:
        FileNotFoundError: neither such a folder nor a commit that has rows.
        ValueError: a line in the folder that is no row, or the start of several commits.
    """
    if Path(name).is_dir():
        if not (rows := _read(Path(name))):
            raise FileNotFoundError(f"got {name}, expected a folder with rows in <gpu>/<bench>.jsonl")
        return rows
    rows = _read(out)
    known = dict.fromkeys(row["git_sha"] for row in reversed(rows) if row["git_sha"])  # the newest first
    found = {sha for sha in known if sha.startswith(name.lower())}
    if len(found) > 1:
        raise ValueError(f"got {name!r}, with which {len(found)} commits start, expected more digits")
    if not found:
        commits = ", ".join(sha[:_SHORT_SHA] for sha in [*known][:_NAMED]) or "none"
        which = f", the newest {_NAMED} of {len(known)}" if len(known) > _NAMED else ""
        raise FileNotFoundError(f"got {name}, expected a folder, or a commit that rows in {out} were measured at{which}: "
                                f"{commits}")
    return [row for row in rows if row["git_sha"] in found]


def _read(folder: Path) -> list[dict]:
    return [row for row in record.read(folder) if not record.is_slow(row)]


def compare(old: Iterable[dict], new: Iterable[dict], noise: float = NOISE) -> Comparison:
    """Pairs rows by what they measured, the latest of each set. Rows without a time, such as counters, are left out.

    Raises:
        ValueError: nothing was measured in both.
    """
    before, after = _latest(old), _latest(new)
    common = [key for key in after if key in before]
    if not common:
        raise ValueError(f"no measurement is in both: {len(before)} are in the old set, {len(after)} in the new")
    pairs = sorted((_pair(before[key], after[key], noise) for key in common), key=lambda pair: -pair["ratio"])
    return Comparison(pairs, len(before) - len(common), len(after) - len(common))


def terminal(comparison: Comparison) -> Table:
    """A table for the terminal: red where slower, green where faster."""
    result = table.make_table(comparison.pairs, "times of both, the slowest first", _COLUMNS)
    result.caption = comparison.summary()
    for row, pair in zip(result.rows, comparison.pairs, strict=True):
        row.style = {"slower": "red", "faster": "green", "same": None}[pair["verdict"]]
    return result


def markdown(comparison: Comparison) -> str:
    """A table in Markdown and a sentence; bold where slower."""
    pairs = [pair | {"verdict": f"**{pair['verdict']}**"} if pair["verdict"] == "slower" else pair for pair in comparison.pairs]
    return table.render(pairs, "markdown", _COLUMNS) + f"\n{comparison.summary()}.\n"


def _latest(rows: Iterable[dict]) -> dict[tuple, dict]:
    timed = [row for row in rows if row.get("p50_us")]
    return {_measurement(row): row for row in sorted(timed, key=lambda row: row["time"])}


def _measurement(row: dict) -> tuple:
    """What the row measures. A training run's length is left out: its times are those of a step."""
    run = {name: value for name, value in (row.get("run") or {}).items() if name not in ("steps", "save_every", "warmup")}
    return (*(row.get(key) for key in (*_SETTINGS, *record.SIZES)), str(record.options(row)), str(sorted(run.items())))


def _pair(old: dict, new: dict, noise: float) -> dict:
    in_graph = all(row.get("graph_p50_us") for row in (old, new))
    key = "graph_p50_us" if in_graph else "p50_us"
    spread = sum((row["p80_us"] - row["p20_us"]) / 2 / row["p50_us"] for row in (old, new)
                 if not (in_graph and row["p50_us"] > _HOST_BOUND * row["graph_p50_us"]))
    ratio, band = new[key] / old[key], max(noise, spread)
    return {
        "bench": new["bench"], "variant": new.get("variant"), "chunk": new.get("chunk_size"),
        "what": " ".join(str(new[key]) for key in ("part", "workload", "preset", "shape", "mode") if new.get(key)),
        "options": record.describe_options(record.options(new)), "old": old[key], "new": new[key],
        "of": "graph" if in_graph else "eager", "ratio": ratio, "band": band,
        # symmetric in ratios, so that swapping old and new swaps the first two
        "verdict": "slower" if ratio > 1 + band else "faster" if ratio < 1 / (1 + band) else "same"}
