"""DRAM bytes and utilisation of every kernel of a call, by Nsight Compute (`ncu`).

ncu runs this command line's hidden command `profiled`, which makes one call between cudaProfilerStart and Stop. It is
run twice, since each metric set needs caches of its own: bytes in one pass over warm caches, as kernels leave them to
one another; hit rates over several passes, each from cold caches. Times under ncu weigh the kernels; they are never
reported as speed.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from . import record, timing
from .bench import Setting
from .shapes import SHAPES

_TIME, _PCT = "gpu__time_duration.sum", "dram__bytes.sum.pct_of_peak_sustained_elapsed"
_READ, _WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
_OCCUPANCY, _REGISTERS = "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread"
_L2_HITS = "lts__t_sector_hit_rate.pct"
_WARM = (_TIME, _PCT, _READ, _WRITE, _OCCUPANCY, _REGISTERS)
_COLD = (_L2_HITS,)


def run(rows: list[dict], out: Path, console: Console) -> None:
    """Counters for what each of the bench's rows measured, appended as rows of the bench `counters`."""
    torch.cuda.empty_cache()  # for the child
    if shutil.which("ncu") is None:
        console.print("--counters: ncu is not installed here, so no counters were read", style="yellow")
        return
    for row in rows:
        try:
            launches = _profile(row)
        except (OSError, subprocess.CalledProcessError, ValueError) as reason:
            text = f"--counters: {row['variant']} {row['shape']} {row['mode']}: ncu gave none: {reason}"
            console.print(text, style="yellow", markup=False)
            continue
        kernels = _by_kernel(launches)
        identity = {key: row[key] for key in record.IDENTITY if key != "bench"}
        for kernel in kernels:
            record.append({"bench": "counters", **identity, **kernel, **record.environment()}, out)
        console.print(_report(row, launches, kernels))


def profiled(variant: str, shape: str, mode: str, dtype: str, chunk_size: int) -> None:
    """One call, warmed up, between the profiler's start and stop: what runs under ncu."""
    with timing.side_stream():
        call = Setting(SHAPES[shape], dtype).call((variant, chunk_size), mode)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse(text: str) -> list[dict]:
    """ncu's raw CSV -> one dict per launch: its kernel's name, and its metrics as numbers in base units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:  # names, units, then launches
        raise ValueError("its output has no kernels")
    names, _, *launches = csv.reader(lines)
    result = []
    for values in launches:
        cells = dict(zip(names, values, strict=True))
        numbers = {name: float(cells[name].replace(",", "")) for name in (*_WARM, *_COLD) if cells.get(name)}
        result.append({"kernel": cells["Kernel Name"], **numbers})
    return result


def _profile(row: dict) -> list[dict]:
    """Both runs' metrics of each launch, in order of launch."""
    warm, cold = _ncu(row, _WARM, "none"), _ncu(row, _COLD, "all")
    if [launch["kernel"] for launch in warm] != [launch["kernel"] for launch in cold]:
        raise ValueError("two runs launched different kernels")
    return [a | b for a, b in zip(warm, cold, strict=True)]


def _ncu(row: dict, metrics: tuple[str, ...], cache_control: str) -> list[dict]:
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--kernel-name-base",
            "function", "--profile-from-start", "off", "--cache-control", cache_control, "--metrics", ",".join(metrics),
            "--log-file", str(log), sys.executable, "-m", "experiments", "profiled",
            *(str(row[key]) for key in ("variant", "shape", "mode", "dtype", "chunk_size")),
        ]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"LC_ALL": "C"})
        return parse(log.read_text())


def _by_kernel(launches: list[dict]) -> list[dict]:
    """One row per kernel: bytes and time summed, percentages weighted with time."""
    groups: dict[str, list[dict]] = {}
    for launch in launches:
        groups.setdefault(launch["kernel"], []).append(launch)

    def weighted(group: list[dict], metric: str) -> float:
        return sum(launch[metric] * launch[_TIME] for launch in group) / sum(launch[_TIME] for launch in group)

    return [
        {
            "kernel": name, "launches": len(group), "ncu_us": sum(launch[_TIME] for launch in group) / 1e3,
            "dram_bytes": sum(launch[_READ] + launch[_WRITE] for launch in group), "dram_pct": weighted(group, _PCT),
            "l2_hit_pct": weighted(group, _L2_HITS), "occupancy_pct": weighted(group, _OCCUPANCY),
            "registers": max(launch[_REGISTERS] for launch in group),
        }
        for name, group in groups.items()
    ]


def _report(row: dict, launches: list[dict], kernels: list[dict]) -> Table:
    """Every kernel, and three ways to average their utilisation, side by side."""
    moved = sum(kernel["dram_bytes"] for kernel in kernels)
    busy_us = sum(kernel["ncu_us"] for kernel in kernels)
    # Bytes a microsecond at 100 %, from the launch whose percentage is least coarse.
    widest = max(launches, key=lambda launch: launch[_PCT])
    peak = (widest[_READ] + widest[_WRITE]) / (widest[_TIME] / 1e3) / (widest[_PCT] / 100)
    result = Table(
        title=f"{row['variant']} {row['shape']} {row['mode']}, chunk {row['chunk_size']}",
        caption=f"DRAM utilisation: {mean(launch[_PCT] for launch in launches):.1f} % mean over launches, "
        f"{sum(k['dram_pct'] * k['ncu_us'] for k in kernels) / busy_us:.1f} % weighted with time, "
        f"{100 * moved / (row['p50_us'] * peak):.1f} % of the peak over the call's own time; "
        f"{moved / row['ideal_bytes']:.1f} times the ideal bytes",
    )
    result.add_column("kernel")
    headers = {"launches": 0, "dram MB": 1, "dram %": 1, "L2 hit %": 1, "occupancy %": 1, "registers": 0}
    for header in headers:
        result.add_column(header, justify="right")
    for kernel in kernels:
        values = (kernel["launches"], kernel["dram_bytes"] / 1e6, kernel["dram_pct"], kernel["l2_hit_pct"],
                  kernel["occupancy_pct"], kernel["registers"])
        written = zip(values, headers.values(), strict=True)
        result.add_row(kernel["kernel"], *(f"{value:.{digits}f}" for value, digits in written))
    return result
