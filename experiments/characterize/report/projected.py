"""What kernels would take on other GPUs, and how far the model that says so is off where it can be tested."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ...shapes import DIRECTIONS
from .. import projection
from ..gpus import EXPS_PER_CLOCK, GPU, GPUS
from . import draw
from .parts import NOT_YET, Figure, Section, Table, to_cell

_GPUS = ("a100", "h100", "h200", "b200")
_HOPPER = ("h100", "h200")  # where the kernels of fused and persistent run that were counted
_ON_HOPPER = ("fused", "persistent")
_SHAPE = "8b-b4"  # whose kernels were counted
_ITS_OWN = 0.1  # of a term's sum of squares; with less that the other terms cannot make up, its coefficient is arbitrary


def section(out: Path) -> Section:
    """Fits, tests, and times of the baseline's kernels, and of those of fused and persistent on Hopper."""
    title = "What if: other GPUs"
    kernels, gpu = projection.read_kernel_samples(out)
    calls, calls_gpu = projection.read_call_samples(out)
    counted, counted_gpu = projection.read_counted_samples(out)
    enough = 2 * len(projection.TERMS)
    if gpu is None or calls_gpu is not gpu or counted_gpu is not gpu or min(map(len, (kernels, calls, counted))) < enough:
        return Section(title, (f"The model needs {enough} kernels and {enough} calls counted and timed on one GPU: {NOT_YET}.",
                               _sheet()))
    tests = {"a kernel left out": projection.leave_out(kernels, gpu, lambda one: one.what),
             "a shape left out": projection.leave_out(calls, gpu, lambda one: one.shape),
             "a kernel left out, by counters": projection.leave_out(counted, gpu, lambda one: one.what)}
    data = [{"test": test, **_facts(left)} for test, found in tests.items() for left in found]

    def plot(ax) -> None:
        ax.plot([5, 1e4], [5, 1e4], color=draw.MUTED, linewidth=1)
        for test, marker, shade in zip(tests, "os^", draw.SERIES, strict=False):
            ax.plot([left.sample.us for left in tests[test]], [left.predicted_us for left in tests[test]], marker, color=shade,
                    markersize=4, label=test, alpha=0.8)
        ax.grid(which="major")

    svg = draw.chart(plot, 3.6, xscale="log", yscale="log", xlabel=f"µs measured on {gpu.name}", ylabel="µs predicted")
    worst = max(tests["a kernel left out"], key=lambda left: abs(left.error))
    of_kernels = f"{len(kernels)} rows of {len({one.what for one in kernels})} kernels"
    of_calls = f"{len(calls)} calls of {len({one.shape for one in calls})} shapes"
    of_counted = f"{len(counted)} rows of {len({one.what for one in counted})} kernels of any variant"
    said = " ".join(f"With {test}, {of}: {_errors(found)}." for (test, found), of in zip(
        tests.items(), (of_kernels, of_calls, of_counted), strict=True))
    see = (f"Errors where the model had not seen what it predicts. {said} Weighted, long kernels count for more. The worst is "
           f"{worst.sample.what}, {worst.predicted_us:.0f} for {worst.sample.us:.0f} µs: " + (
               "what binds it is none of the five terms." if worst.predicted_us < worst.sample.us else
               "terms that other kernels need so large are too large for it."))
    model = projection.fit(kernels, gpu)
    fitted = {of_kernels: kernels, of_calls: calls, of_counted: counted}
    on_hopper = [one for one in counted if one.variant in _ON_HOPPER]
    terms = Table(("fitted to", "launch, µs", *projection.TERMS[1:]), [
        (name, *(to_cell(value, 2) for value in projection.fit(samples, gpu).coefficients))
        for name, samples in fitted.items()])
    return Section(title, (
        "A time is the sum of launches, bytes, tensor FLOPs, vector FLOPs and exponentials, each at the data sheet's rate "
        "times a coefficient that rows of one GPU fix. In the table of these, 1 is a term that costs what the data sheet says.",
        terms, *_not_told_apart(fitted, gpu), Figure("projection-test", svg, see, data),
        f"Microseconds of the baseline's kernels on {_SHAPE}. {gpu.name} is measured; **the others are extrapolated**: nothing "
        "says that the coefficients hold there, and a kernel's error above is the least to expect.",
        _times(kernels, model),
        f"Of {' and '.join(_ON_HOPPER)} on {_SHAPE}, all terms by counters. Their kernels are for Hopper; elsewhere plain ones "
        "run, which were not counted. A call is the sum of its kernels.",
        _times_of_calls(on_hopper, projection.fit(counted, gpu)), _sheet()))


def _facts(left: projection.Left) -> dict:
    one = left.sample
    return {"variant": one.variant, "what": one.what, "shape": one.shape, "mode": one.mode, "chunk_size": one.chunk_size,
            "measured_us": one.us, "predicted_us": round(left.predicted_us, 2), "error": round(left.error, 4)}


def _errors(found: list[projection.Left]) -> str:
    errors = projection.summarise(found)
    return (f"{100 * errors.median:.0f} % in the median, {100 * errors.largest:.0f} % at most, "
            f"{100 * errors.weighted:.0f} % weighted with time")


def alike(samples: list[projection.Sample], gpu: GPU) -> list[str]:
    """Terms that a combination of the others nearly equals in every sample: rows do not fix their coefficients."""
    matrix = np.array([sample.terms_us(gpu) for sample in samples]) / np.array([[sample.us] for sample in samples])
    found = []
    for n, name in enumerate(projection.TERMS):
        term, others = matrix[:, n], np.delete(matrix, n, axis=1)
        left = term - others @ np.linalg.lstsq(others, term, rcond=None)[0]
        if left @ left < _ITS_OWN * (term @ term):
            found.append(name)
    return found


def _not_told_apart(fitted: dict[str, list[projection.Sample]], gpu: GPU) -> list[str]:
    """A paragraph, where there is something to say."""
    said = [f"the {name} do not tell {', '.join(terms[:-1])} and {terms[-1]} apart" for name, samples in fitted.items()
            if len(terms := alike(samples, gpu)) > 1]
    if not said:
        return []
    text = "; ".join(said)
    return [f"{text[0].upper()}{text[1:]}: each of these terms is nearly a combination of the others. What they add up to is "
            "fitted; **their coefficients are not to be read one by one**, neither a 0 nor a large one."]


def _times(kernels: list[projection.Sample], model: projection.Model) -> Table:
    latest = {(one.mode, one.what, one.chunk_size): one for one in kernels if one.shape == _SHAPE}
    rows = [(one.what, DIRECTIONS.get(one.mode, one.mode), str(one.chunk_size), _largest(model, [one]),
             *(to_cell(_us(model, [one], key), 1) for key in _GPUS)) for one in latest.values()]
    return Table(("kernel", "", "chunk", "largest term", *_named(model, _GPUS)), rows, 2)


def _times_of_calls(kernels: list[projection.Sample], model: projection.Model) -> Table:
    """Each kernel, and their sum, of calls of one shape."""
    calls: dict[tuple[str, str, int], list[projection.Sample]] = {}
    for one in kernels:
        if one.shape == _SHAPE:
            calls.setdefault((one.variant, one.mode, one.chunk_size), []).append(one)
    rows = [(variant, DIRECTIONS.get(mode, mode), str(chunk), name, _largest(model, part),
             *(to_cell(_us(model, part, key), 1) for key in _HOPPER))
            for (variant, mode, chunk), of in calls.items() for name, part in (*((one.what, [one]) for one in of), ("all", of))]
    return Table(("variant", "", "chunk", "kernel", "largest term", *_named(model, _HOPPER)), rows, 5)


def _us(model: projection.Model, kernels: list[projection.Sample], key: str) -> float:
    """Measured, or carried over."""
    return sum(one.us if GPUS[key] is model.gpu else model.projected_us(one, GPUS[key]) for one in kernels)


def _largest(model: projection.Model, kernels: list[projection.Sample]) -> str:
    """The term that the model has most of their time from."""
    parts = Counter()
    for one in kernels:
        parts.update(model.parts_us(one))
    return max(parts, key=parts.get)


def _named(model: projection.Model, keys: tuple[str, ...]) -> list[str]:
    return [f"{GPUS[key].name}, {'measured' if GPUS[key] is model.gpu else 'extrapolated'}" for key in keys]


def _sheet() -> Table:
    """The GPU table with a source for each number."""
    rows = []
    for gpu in GPUS.values():
        cells = (("SMs", gpu.sms, ""), ("memory", gpu.hbm_gbps, " GB/s"), ("dense bf16", gpu.bf16_tflops, " TFLOP/s"),
                 ("FP32", gpu.fp32_tflops, " TFLOP/s"), ("L2", gpu.l2_mb, " MB"), ("FP32 lanes an SM", gpu.fp32_lanes, ""))
        for what, cell, unit in cells:
            rows.append((gpu.name, what, f"{cell.value:g}{unit}", cell.confidence, cell.source))
        rows.append((gpu.name, "exponentials", f"{gpu.exps_per_s / 1e12:.2f} T/s", "derived",
                     f"{EXPS_PER_CLOCK} a clock and SM, at the clock that the FP32 rate implies"))
    return Table(("GPU", "", "value", "confidence", "source"), rows, 2)
