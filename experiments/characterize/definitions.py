"""What is meant by utilisation, bandwidth and the like; every number of that kind in the report is made here.

With kernels k of a call, their DRAM bytes b_k and times t_k under ncu, T the call's time without a profiler, P a peak:

    U = mean over k of b_k / (t_k P)            each kernel counts the same, however short
    W = sum b_k / (P sum t_k)                   weighted with time
    G = sum b_k / (P T)                         what lies between kernels counts as well

The paper's 57.5 % does not say which of these it is, so all three are printed, and each against every peak: ncu's
own, the data sheet's and the copy of the same run (P T is unknown to ncu, hence no G of its own). Bytes come from a run with
warm caches, as kernels leave them to one another.

    effective bandwidth       the ideal operator's bytes / T      compares variants, whatever they move
    measured bandwidth        DRAM bytes / T                      how busy the memory is
    traffic amplification     DRAM bytes / the ideal's
    fraction of the speed of light   floor / T, the floor being the ideal's bytes at the copy's rate

T is the time in a CUDA graph where there is one, else of an eager call; where nobody timed the call at the commit at which it
was counted, at another (`Call.same_commit`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from ssd import cost

from .. import counters, record, table
from ..shapes import Shape, is_gated
from .gpus import find

NCU, DATASHEET, COPY = "ncu", "data sheet", "copy"
_OF_CALLS = ("ssd", "ablate")  # benches that time what `counters` counts


@dataclass(frozen=True)
class Call:
    """One call as it was counted last. timed: the latest row with its time, of the same commit if there is one."""

    row: dict
    kernels: tuple[dict, ...]
    timed: dict | None

    @property
    def wall_us(self) -> float | None:
        """T."""
        return self.timed and record.get_us(self.timed)

    @property
    def same_commit(self) -> bool:
        return self.timed is not None and self.timed["git_sha"] == self.row["git_sha"]

    @property
    def dram_bytes(self) -> float:
        return sum(kernel["dram_bytes"] for kernel in self.kernels)

    @property
    def problem(self) -> cost.Problem:
        return make_problem(self.row)

    @property
    def ideal(self) -> cost.Cost:
        return cost.ideal(self.problem, self.row["mode"])

    @property
    def peaks(self) -> dict[str, float]:
        """GB/s by their names, those that are known, but for ncu's."""
        gpu = find(self.row["gpu"])
        return ({DATASHEET: gpu.hbm_gbps.value} if gpu else {}) | ({COPY: self.timed["copy_gbps"]} if self.timed else {})


class Utilisation(NamedTuple):
    """Per cent of a peak; G is None where T or the peak is unknown."""

    U: float
    W: float
    G: float | None


def make_problem(row: dict) -> cost.Problem:
    """The sizes of a row's call, for the cost model."""
    shape = Shape(row["shape"], **{key: row[key] for key in record.SIZES}, gated=is_gated(row["shape"]))
    return shape.problem(row["chunk_size"], row["dtype"])


def read_calls(out: Path = record.RESULTS) -> list[Call]:
    """Every call that counters were read for, as it was counted last, in the order of tables."""
    timed = [row for bench in _OF_CALLS for row in record.read(out, bench=bench)]
    return [Call(row, tuple(kernels), _find_time(row, timed)) for row, kernels in counters.read_calls(out)]


def keep_fastest_chunk(calls: Iterable[Call]) -> list[Call]:
    """Of calls that differ in nothing but the chunk size the fastest, as far as they were timed."""
    groups = record.group_by(calls, lambda call: table.identify(call.row)[:-1])
    return [min(group, key=lambda call: call.wall_us or math.inf) for group in groups.values()]


def compute_utilisations(call: Call) -> dict[str, Utilisation]:
    """{peak: U, W and G}."""
    kernels = call.kernels
    times = [kernel["ncu_us"] for kernel in kernels]
    percent = [kernel["dram_pct"] for kernel in kernels]
    result = {NCU: Utilisation(mean(percent), sum(map(float.__mul__, percent, times)) / sum(times), None)}
    for name, peak in call.peaks.items():
        result[name] = Utilisation(
            mean(percent_of_peak(kernel["dram_bytes"], kernel["ncu_us"], peak) for kernel in kernels),
            percent_of_peak(call.dram_bytes, sum(times), peak),
            percent_of_peak(call.dram_bytes, call.wall_us, peak) if call.wall_us else None)
    return result


def percent_of_peak(n_bytes: float, us: float, peak_gbps: float) -> float:
    """Per cent of a peak that bytes in a time are."""
    return 100 * gbps(n_bytes, us) / peak_gbps


def gbps(n_bytes: float, us: float) -> float:
    """10^9 bytes a second."""
    return n_bytes / us / 1e3


def compute_amplification(call: Call) -> float:
    """DRAM bytes over those of the ideal operator."""
    return call.dram_bytes / call.ideal.bytes


def compute_speed_of_light(call: Call) -> float | None:
    """The least time that the ideal's bytes take at the copy's rate, over the call's time; 1 is the limit."""
    return call.timed and gbps(call.ideal.bytes, call.wall_us) / call.timed["copy_gbps"]


def count_vector_flops(kernel: dict) -> float | None:
    """fp32 additions and multiplications that were counted, a fused one as two; None where they were not."""
    if any(key not in kernel for key in ("fadds", "fmuls", "ffmas")):
        return None
    return kernel["fadds"] + kernel["fmuls"] + 2 * kernel["ffmas"]


def _find_time(row: dict, timed: Iterable[dict]) -> dict | None:
    same = ("gpu", "variant", "mode", "shape", "dtype", "chunk_size")
    found = [other for other in timed if all(other[key] == row[key] for key in same)
             and record.options(other) == record.options(row)]
    return max(found, key=lambda other: (other["git_sha"] == row["git_sha"], other["time"]), default=None)
