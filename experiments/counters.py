"""What every kernel of a call does to DRAM, its blocks and its pipes, by Nsight Compute (`ncu`).

ncu runs this command line's hidden command `once`, which makes one call between cudaProfilerStart and Stop. It is
run three times, since each metric set needs caches of its own: bytes and blocks in one pass over warm caches, as kernels leave
them to one another; hit rates and pipes over several passes, each from cold caches; hit rates again over warm ones. Steps of
training have fewer metrics, in one of these runs (`profile`, `count_traffic`). Kernels that tune themselves do so in a run
before, without ncu. Times under ncu weigh the kernels; they are never reported as speed. A metric that this ncu or GPU does not
know is left out of the rows.
"""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from configparser import ConfigParser
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from ssd import Options
from ssd.registry import is_peer

from . import autotuned_configs, record, table, timing
from .bench import Candidate, Setting
from .shapes import find_shapes

_TIME, _READ, _WRITE = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
_METRICS = ConfigParser()
_METRICS.read_string(Path(__file__).with_suffix(".ini").read_text())
_WARM, _COLD, _HITS = (dict(_METRICS[caches]) for caches in ("warm", "cold", "hits"))  # {key of a row: metric}
TENSOR_FLOPS = _COLD["tensor_flops"]
_FLOPS = ("tensor_flops", "fadds", "fmuls", "ffmas")
_COUNTED = ("tensor_insts", *_FLOPS, "exps")
_LONGEST_S = 1800  # each kernel of a call is run many times over
_REQUIRED = (_TIME, _READ, _WRITE, _WARM["dram_pct"])
_SUMMED = ("launches", "ncu_us", "dram_bytes", "blocks", *_COUNTED)
_WEIGHTED = ("dram_pct", "occupancy_pct", "block_cycles", *(key for key in _COLD if key not in _COUNTED), *_HITS)


def run(rows: list[dict], out: Path, console: Console) -> None:
    """Counters for what each of the bench's rows measured, appended as rows of the bench `counters`."""
    for row, launches, kernels in append_counts(rows, "counters", _make_arguments, ("variant", "shape", "mode"), out, console):
        console.print(_tabulate_kernels(row, launches, kernels))


def append_counts(rows: list[dict], bench: str, call_of: Callable[[dict], list[str]], named: tuple[str, ...], out: Path,
            console: Console) -> Iterator[tuple[dict, list[dict], list[dict]]]:
    """Appends what ncu counts of what each row measured as rows of `bench`, one for each kernel; yields the row, the launches
    and the kernels. Why ncu gave none, if it did not, is printed.

    call_of: what makes the row's call, as arguments of the command line; named: the keys that say in a message which it is.
    """
    torch.cuda.empty_cache()  # for the child
    if shutil.which("ncu") is None:
        console.print("--counters: ncu is not installed here, so no counters were read", style="yellow")
        return
    for row in rows:
        try:
            launches = profile(call_of(row), tunes=is_peer(row["variant"]))
        except (OSError, ValueError) as reason:
            text = f"--counters: {' '.join(row[key] for key in named)}: ncu gave none: {reason}"
            console.print(text, style="yellow", markup=False)
            continue
        kernels = merge_by_kernel(launches)
        identity = {key: row[key] for key in (*record.IDENTITY, "part") if key in row}
        # one time for all kernels: by it those of one run are known
        record.add((identity | {"bench": bench} | kernel for kernel in kernels), out)
        yield row, launches, kernels


def run_between_marks(call: Callable[[], object], warmup: int = 3) -> None:
    """The call, warmed up, once between the profiler's start and stop: what runs under ncu."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def run_call(variant: str, shape: str, mode: str, dtype: str, chunk_size: int, options: dict[str, bool] | None) -> None:
    """One call: what `bench --counters` runs under ncu. options: None of a peer."""
    candidate = Candidate(variant, chunk_size, Options(**(options or {})))
    with autotuned_configs.hand_over_configs(), timing.side_stream():
        run_between_marks(Setting(*find_shapes(shape), dtype).call(candidate, mode))


def read_latest(out: Path = record.RESULTS, by_kernel: bool = False) -> list[dict]:
    """A line for each call, from the kernels that it had when it was last measured; by_kernel: also one for each kernel.

    Besides a row's keys, mean_dram_pct is the mean over kernels, where one that is launched twice counts once, and time_pct
    a kernel's share of its call's time.
    """
    return [line for call, kernels in read_calls(out) for line in (call, *(kernels if by_kernel else ()))]


def read_calls(out: Path = record.RESULTS) -> list[tuple[dict, list[dict]]]:
    """The lines of `read_latest` by call: the call's own, and those of its kernels."""
    runs = record.keep_last_runs(table.keep_last_commit(record.read(out, bench="counters")), table.identify)
    return [(call, [_merge_call([kernel], kernel["kernel"], call["ncu_us"]) for kernel in runs[table.identify(call)]])
            for call in table.sort_rows([_merge_call(kernels) for kernels in runs.values()])]


def _merge_call(kernels: list[dict], name: str = "all", call_us: float | None = None) -> dict:
    """Rows of kernels as one line; call_us: the time of their call, if they are not all of it."""
    merged = _merge_parts(kernels)
    return {
        **{key: kernels[0][key] for key in (*record.IDENTITY, *record.ENVIRONMENT)}, "kernel": name, **merged,
        "mean_dram_pct": mean(kernel["dram_pct"] for kernel in kernels),
        "time_pct": 100 * merged["ncu_us"] / (call_us or merged["ncu_us"])}


def parse(text: str) -> list[dict]:
    """ncu's raw CSV -> one dict per launch: its kernel's name, and those metrics in base units that have a value."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:  # names, units, then launches
        raise ValueError("its output has no kernels")
    names, _, *launches = csv.reader(lines)
    result = []
    for values in launches:
        cells = dict(zip(names, values, strict=True))
        numbers = {name: _parse_number(cells.get(name, "")) for name in (*_REQUIRED, *_WARM.values(), *_COLD.values())}
        known = {name: number for name, number in numbers.items() if number is not None}
        result.append({"kernel": cells["Kernel Name"], **known})
    return result


def _parse_number(cell: str) -> float | None:
    """None for an empty cell, `n/a` and `nan`: a metric unknown, or not collected."""
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def profile(arguments: list[str], brief: bool = False, tunes: bool = False) -> list[dict]:
    """The runs' values of each launch that the command line with these arguments makes, in order, as a row has them.

    Args:
        brief: times, bytes and FLOPs alone, for a call of hundreds of kernels amid gigabytes, which ncu would copy for each: it
            runs the whole command again for each pass instead, so that caches are warm in all.
        tunes: some of the kernels tune themselves, which they then do without ncu.

    Raises:
        ValueError, OSError: as `run_ncu` and `autotuned_configs.tune_first`; two runs differ, or a required metric is missing.
    """
    with autotuned_configs.tune_first(arguments, _LONGEST_S) if tunes else nullcontext():
        if brief:
            metrics = (*_REQUIRED, *(_COLD[key] for key in _FLOPS))
            return [_make_launch(launch) for launch in run_ncu(arguments, metrics, "none", replay="application")]
        runs = [run_ncu(arguments, (_TIME, _READ, _WRITE, *_WARM.values()), "none", single_pass=True),
                run_ncu(arguments, _COLD.values(), "all"), run_ncu(arguments, _HITS.values(), "none", single_pass=True)]
    if len({tuple(launch["kernel"] for launch in launches) for launches in runs}) > 1:
        raise ValueError("two runs launched different kernels")
    # ncu's output has some metrics unasked, times among them: what a row's bytes took is those of their own run
    return [_make_launch(rest | warm) | {key: hits[metric] for key, metric in _HITS.items() if metric in hits}
            for warm, rest, hits in zip(*runs, strict=True)]


def count_traffic(arguments: list[str], only: str, tunes: bool = False) -> list[dict]:
    """As `profile`, times and bytes alone, of the kernels whose names a regular expression is in: one pass, so one run."""
    with autotuned_configs.tune_first(arguments, _LONGEST_S) if tunes else nullcontext():
        return [_make_launch(launch) for launch in run_ncu(arguments, _REQUIRED, "none", single_pass=True, only=only)]


def _make_launch(metrics: dict) -> dict:
    """One launch as a row has it."""
    if missing := [metric for metric in _REQUIRED if metric not in metrics]:
        raise ValueError(f"{metrics['kernel']} has no {', '.join(missing)}")
    return {
        "kernel": metrics["kernel"], "launches": 1, "ncu_us": metrics[_TIME] / 1e3,
        "dram_bytes": metrics[_READ] + metrics[_WRITE],
        **{key: metrics[metric] for key, metric in (_WARM | _COLD).items() if metric in metrics}}


def _make_arguments(row: dict) -> list[str]:
    """What makes the call that the row measured, as arguments of the command line."""
    call = {key: row[key] for key in ("variant", "shape", "mode", "dtype", "chunk_size", "options")}
    return ["once", "counters:run_call", json.dumps(call)]


def run_ncu(arguments: list[str], metrics: Iterable[str], cache_control: str, single_pass: bool = False,
        replay: str = "kernel", only: str | None = None) -> list[dict]:
    """The metrics of each launch between the profiler's start and stop while this command line runs with the arguments.

    single_pass: warn where ncu needs more, since each leaves the caches warm for the next.
    replay: what ncu runs again for another pass, a kernel or the application.
    only: a regular expression; kernels without it in their names run as if there were no ncu.

    Raises:
        ValueError: ncu failed, or saw no kernel; the message has the end of what it said.
        OSError: it could not be started.
    """
    chosen = ["--kernel-name", f"regex:{only}"] if only else []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--kernel-name-base",
            "function", "--profile-from-start", "off", "--cache-control", cache_control, "--replay-mode", replay,
            *chosen, "--metrics", ",".join(metrics), "--log-file", str(log), sys.executable, "-m", "experiments", *arguments]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, timeout=_LONGEST_S)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"ncu did not end in {_LONGEST_S} s; expected a smaller shape or preset") from error
        text = log.read_text() if log.exists() else ""
    if ran.returncode:
        raise ValueError(f"exit status {ran.returncode}: {(text + ran.stderr).strip()[-400:]}")
    if single_pass and (passes := re.search(r"100% - (\d+) passes", text)):
        warnings.warn(f"ncu took {passes[1]} passes, expected 1: its replays warmed the caches", stacklevel=2)
    return parse(text)


def merge_by_kernel(launches: list[dict]) -> list[dict]:
    """One row per kernel."""
    groups = record.group_by(launches, itemgetter("kernel"))
    return [{"kernel": name, **_merge_parts(group)} for name, group in groups.items()]


def _merge_parts(parts: list[dict]) -> dict:
    """Launches, or kernels, as one: counts summed, the most registers, the rest weighted with time. What one lacks, all do."""

    def weigh(values: list[float]) -> float:
        return sum(value * part["ncu_us"] for value, part in zip(values, parts, strict=True)) / sum(p["ncu_us"] for p in parts)

    ways = {**dict.fromkeys(_SUMMED, sum), **dict.fromkeys(_WEIGHTED, weigh), "registers": max}
    return {key: way([part[key] for part in parts]) for key, way in ways.items() if all(key in part for part in parts)}


def _tabulate_kernels(row: dict, launches: list[dict], kernels: list[dict]) -> Table:
    """Every kernel, and three ways to average their utilisation, side by side."""
    whole = _merge_parts(kernels)
    # Bytes a microsecond at 100 %, from the launch whose percentage is least coarse.
    widest = max(launches, key=lambda launch: launch["dram_pct"])
    peak = widest["dram_bytes"] / widest["ncu_us"] / (widest["dram_pct"] / 100)
    title = f"{row['variant']} {row['shape']} {row['mode']}, chunk {row['chunk_size']}"
    result = table.make_table(kernels, title, table.KERNELS)
    result.caption = (
        f"DRAM utilisation: {mean(launch['dram_pct'] for launch in launches):.1f} % mean over launches, "
        f"{whole['dram_pct']:.1f} % weighted with time, "
        f"{100 * whole['dram_bytes'] / (row['p50_us'] * peak):.1f} % of the peak over the call's own time; "
        f"{whole['dram_bytes'] / row['ideal_bytes']:.1f} times the ideal bytes")
    return result
