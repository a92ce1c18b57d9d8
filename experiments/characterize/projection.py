"""What kernels would take on other GPUs: a time made of five terms, fitted to one GPU's rows and carried over.

    t = c0 launches + c1 bytes / B + c2 tensor / T + c3 vector / V + c4 exps / E

B, T, V and E are the data sheet's rates of the GPU, and c >= 0 are how far from them the kernels are: c0 in microseconds, the
others 1 where a rate is reached and nothing overlaps. They minimise the sum of squared relative errors. A term that overlaps
another perfectly gets a small c, one that stands for more than it counts a large one (vector: latency and addresses too).

On the GPU that was measured the model is tested by leaving out what it then predicts: every row of one kernel, or of one shape.
On any other GPU the c are assumed to be the same and nothing is tested, so those times are extrapolated; they are the measured
time times the model's ratio of the two GPUs, which cancels what the model misses of a kernel on both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pandas as pd

from ssd import cost

from .. import counters, record, table
from ..kernel_names import is_of_operator
from ..shapes import CHUNK_SIZES, MODELS
from . import classes
from .definitions import count_vector_flops, keep_one_gpu, make_problem
from .gpus import GPU, GPUS, find

TERMS = ("launch", "bytes", "tensor", "vector", "exponentials")
_KEPT_LAUNCHES = 14  # of a backward whose forward kept its states


@dataclass(frozen=True)
class Sample:
    """Something that was timed, and what it does."""

    what: str
    shape: str
    mode: str
    chunk_size: int
    us: float
    launches: int
    work: cost.Cost
    variant: str = "baseline"

    def terms_us(self, gpu: GPU) -> tuple[float, ...]:
        """The terms at the data sheet's rates, in microseconds; the first is a number of launches."""
        return (self.launches, self.work.bytes / gpu.hbm_gbps.value / 1e3, self.work.flops / gpu.bf16_tflops.value / 1e6,
                self.work.vector / gpu.fp32_tflops.value / 1e6, self.work.exps / gpu.exps_per_s * 1e6)


@dataclass(frozen=True)
class Model:
    """Coefficients of the terms, as fitted on a GPU."""

    coefficients: tuple[float, ...]
    gpu: GPU

    def us(self, sample: Sample, gpu: GPU | None = None) -> float:
        """The model's time on a GPU, its own unless given."""
        return sum(c * term for c, term in zip(self.coefficients, sample.terms_us(gpu or self.gpu), strict=True))

    def project_us(self, sample: Sample, gpu: GPU) -> float:
        """The sample's measured time, carried over to another GPU."""
        return sample.us * self.us(sample, gpu) / self.us(sample)

    def parts_us(self, sample: Sample) -> dict[str, float]:
        """What each term contributes."""
        return {name: c * term for name, c, term in zip(TERMS, self.coefficients, sample.terms_us(self.gpu), strict=True)}


@dataclass(frozen=True)
class Left:
    """A sample that was left out of the fit that predicted it."""

    sample: Sample
    predicted_us: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is a tenth too long."""
        return self.predicted_us / self.sample.us - 1


def fit(samples: list[Sample], gpu: GPU) -> Model:
    """The coefficients that are nearest to the samples' times on their GPU.

    Non-negative least squares over every subset of the terms: there are 31.

    Raises:
        ValueError: fewer samples than terms.
    """
    if len(samples) < len(TERMS):
        raise ValueError(f"got {len(samples)} samples, expected at least {len(TERMS)}, one for each term")
    matrix = np.array([sample.terms_us(gpu) for sample in samples]) / np.array([[sample.us] for sample in samples])
    best, found = np.inf, np.zeros(len(TERMS))
    for count in range(1, len(TERMS) + 1):
        for chosen in map(list, combinations(range(len(TERMS)), count)):
            values = np.linalg.lstsq(matrix[:, chosen], np.ones(len(samples)), rcond=None)[0]
            error = float(np.square(matrix[:, chosen] @ values - 1).sum())
            if (values >= 0).all() and error < best:
                best, found = error, np.zeros(len(TERMS))
                found[chosen] = values
    return Model(tuple(found.tolist()), gpu)


def leave_out(samples: list[Sample], gpu: GPU, key: Callable[[Sample], str]) -> list[Left]:
    """Every sample, predicted by a fit to those of other keys alone."""
    result = []
    for group in dict.fromkeys(map(key, samples)):
        model = fit([sample for sample in samples if key(sample) != group], gpu)
        result += [Left(sample, model.us(sample)) for sample in samples if key(sample) == group]
    return result


class Errors(NamedTuple):
    """Relative, without sign. weighted: the sum of the errors in microseconds over that of the measured times."""

    median: float
    largest: float
    weighted: float


def summarise(left: list[Left]) -> Errors:
    """Of rows alike, and weighted with time, as long kernels count in a step."""
    errors = [abs(one.error) for one in left]
    apart = sum(abs(one.predicted_us - one.sample.us) for one in left)
    return Errors(median(errors), max(errors), apart / sum(one.sample.us for one in left))


def read_kernel_samples(out: Path = record.RESULTS) -> tuple[list[Sample], GPU | None]:
    """The baseline's kernels, all that were ever counted on a GPU: times and bytes by ncu, the rest by the cost model. And the
    GPU; None without rows, or if it is not in the table.
    """
    rows = keep_one_gpu([row for row in record.read(out, bench="counters", variant="baseline") if classes.model(row)])
    return _make_samples(rows, lambda row: replace(classes.model(row), bytes=row["dram_bytes"]))


def read_samples_of_counters(out: Path = record.RESULTS) -> tuple[list[Sample], GPU | None]:
    """The operator's kernels of every variant, upstream's among them, of calls in bf16 with every option, as ncu counted them
    last: all terms are its. And their GPU, likewise.
    """
    rows = keep_one_gpu([row for row in counters.read_latest(out, by_kernel=True)
                       if row["dtype"] == "bf16" and record.has_default_options(row)
                       and is_of_operator(row["kernel"]) and classes.read_counters(row) and "exps" in row])
    return _make_samples(rows, lambda row: cost.Cost(row["dram_bytes"], row["tensor_flops"], row["exps"],
                                                     count_vector_flops(row)))


def read_call_samples(out: Path = record.RESULTS) -> tuple[list[Sample], GPU | None]:
    """Whole forwards and backwards of the baseline in CUDA graphs, at every shape and chunk size; all by the cost model. And
    their GPU, likewise.
    """
    rows = record.latest(table.keep_last_commit(record.read(out, bench="ssd", variant="baseline")), table.identify)
    rows = keep_one_gpu([row for row in rows if row["mode"] in ("fwd", "bwd") and row["graph_p50_us"] and row["launches"]
                       and record.has_default_options(row)])
    return _make_samples(rows, lambda row: cost.total(_count_stages(row)))


def _make_samples(rows: list[dict], work_of: Callable[[dict], cost.Cost]) -> tuple[list[Sample], GPU | None]:
    """Of kernels or calls on one GPU, and that."""
    return [Sample(classes.name_stage(row) if "kernel" in row else row["variant"], row["shape"], row["mode"], row["chunk_size"],
                   row["ncu_us"] if "kernel" in row else row["graph_p50_us"], row["launches"], work_of(row), row["variant"])
            for row in rows], find(rows[0]["gpu"]) if rows else None


def _count_stages(row: dict) -> dict[str, cost.Cost]:
    """Of a call of the baseline, whose backward does without two stages where its launches are too few for them."""
    if row["mode"] == "fwd":
        return cost.count_forward_stages(make_problem(row))
    return cost.count_backward_stages(make_problem(row), keeps_states=row["launches"] <= _KEPT_LAUNCHES)


def freeze(path: Path, out: Path = record.RESULTS) -> None:
    """Writes what this model says of calls on an H100, before they are measured: microseconds, a line for each call.

    A call that was timed on the H200 is carried over; those of published models, which were not, are predicted outright. The
    calls of fused and persistent are sums of kernels by counters; theirs have no chunk size, since their kernels on Hopper cut
    in their own way.
    """
    target, lines = GPUS["h100"], []
    calls, gpu = read_call_samples(out)
    model = fit(calls, gpu)
    for one in calls:
        lines.append((one.variant, one.mode, one.shape, one.chunk_size, one.launches, "carried over",
                      model.project_us(one, target)))
    for shape in MODELS:
        for chunk in CHUNK_SIZES:
            for mode, launches in (("fwd", 5), ("bwd", 13)):
                row = {"mode": mode, "shape": shape.name, **shape.sizes, "chunk_size": chunk, "dtype": "bf16",
                       "launches": launches}
                one = Sample("baseline", shape.name, mode, chunk, 0.0, launches, cost.total(_count_stages(row)))
                lines.append(("baseline", mode, shape.name, chunk, launches, "outright", model.us(one, target)))
    counted, gpu = read_samples_of_counters(out)
    model = fit(counted, gpu)
    of_calls = record.group_by([one for one in counted if one.variant in ("fused", "persistent")],
                               lambda one: (one.variant, one.mode, one.shape))
    for (variant, mode, shape), kernels in of_calls.items():
        lines.append((variant, mode, shape, None, sum(one.launches for one in kernels), "carried over",
                      sum(model.project_us(one, target) for one in kernels)))
    keys = ("variant", "mode", "shape", "chunk_size", "launches", "basis", "predicted_us")
    frame = pd.DataFrame(lines, columns=keys).astype({"chunk_size": "Int64"})
    frame.round({"predicted_us": 2}).to_csv(path, index=False)
