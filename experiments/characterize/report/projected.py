"""What kernels would take on other GPUs, and how far the model that says so is off where it can be tested."""

from collections import Counter

import numpy as np

from ... import record
from ...shapes import DIRECTIONS
from .. import projection
from ..gpus import EXPS_PER_CLOCK, GPU, GPUS
from . import draw
from .parts import Figure

_GPUS = ("a100", "h100", "h200", "b200")
_HOPPER = ("h100", "h200")  # where the kernels of fused and persistent run that were counted
_ON_HOPPER = ("fused", "persistent")
_SHAPE = "8b-b4"  # whose kernels were counted
_ITS_OWN = 0.1  # of a term's sum of squares; with less that the other terms cannot make up, its coefficient is arbitrary
ENOUGH = 2 * len(projection.TERMS)
Samples = list[projection.Sample]


def collect(rows: list[dict]) -> dict:
    """Fits, tests, and times of the baseline's kernels, and of those of fused and persistent on Hopper; nothing where one GPU
    has not enough rows.
    """
    (kernels, gpu), *others = (read(rows) for read in (
        projection.read_kernel_samples, projection.read_call_samples, projection.read_samples_of_counters))
    (calls, _), (counted, _) = others
    if gpu is None or any(other is not gpu for _, other in others) or min(map(len, (kernels, calls, counted))) < ENOUGH:
        return {}
    tests = {"a kernel left out": projection.leave_out(kernels, gpu, lambda one: one.what),
             "a shape left out": projection.leave_out(calls, gpu, lambda one: one.shape),
             "a kernel left out, by counters": projection.leave_out(counted, gpu, lambda one: one.what)}
    data = [{"test": test, **_list_facts(left)} for test, found in tests.items() for left in found]

    def plot(ax) -> None:
        ax.plot([5, 1e4], [5, 1e4], color=draw.MUTED, linewidth=1)
        for test, marker, shade in zip(tests, "os^", draw.SERIES, strict=False):
            ax.plot([left.sample.us for left in tests[test]], [left.predicted_us for left in tests[test]], marker, color=shade,
                    markersize=4, label=test, alpha=0.8)
        ax.grid(which="major")

    svg = draw.chart(plot, 3.6, xscale="log", yscale="log", xlabel=f"µs measured on {gpu.name}", ylabel="µs predicted")
    fitted = {f"{len(kernels)} rows of {len({one.what for one in kernels})} kernels": kernels,
              f"{len(calls)} calls of {len({one.shape for one in calls})} shapes": calls,
              f"{len(counted)} rows of {len({one.what for one in counted})} kernels of any variant": counted}
    models = {name: projection.fit(samples, gpu) for name, samples in fitted.items()}
    of_baseline, _, of_any = models.values()
    latest = {(one.mode, one.what, one.chunk_size): one for one in kernels if one.shape == _SHAPE}
    return {
        "figures": {"projection-test": Figure(svg, data)}, "gpu": gpu, "models": models, "shape": _SHAPE,
        "tests": [(test, of, projection.summarise(found)) for (test, found), of in zip(tests.items(), fitted, strict=True)],
        "worst": max(tests["a kernel left out"], key=lambda left: abs(left.error)),
        "not_told_apart": {name: terms for name, samples in fitted.items() if len(terms := find_alike(samples, gpu)) > 1},
        "gpus": _name_gpus(gpu, _GPUS), "hopper": _name_gpus(gpu, _HOPPER), "on_hopper": _ON_HOPPER,
        "kernels": [(one.what, DIRECTIONS.get(one.mode, one.mode), one.chunk_size, *_project(of_baseline, [one], _GPUS))
                    for one in latest.values()],
        "calls": _list_calls([one for one in counted if one.variant in _ON_HOPPER and one.shape == _SHAPE], of_any)}


def _list_facts(left: projection.Left) -> dict:
    one = left.sample
    return {"variant": one.variant, "what": one.what, "shape": one.shape, "mode": one.mode, "chunk_size": one.chunk_size,
            "measured_us": one.us, "predicted_us": round(left.predicted_us, 2), "error": round(left.error, 4)}


def find_alike(samples: Samples, gpu: GPU) -> list[str]:
    """Terms that a combination of the others nearly equals in every sample: rows do not fix their coefficients."""
    matrix = np.array([sample.terms_us(gpu) for sample in samples]) / np.array([[sample.us] for sample in samples])
    found = []
    for n, name in enumerate(projection.TERMS):
        term, others = matrix[:, n], np.delete(matrix, n, axis=1)
        left = term - others @ np.linalg.lstsq(others, term, rcond=None)[0]
        if left @ left < _ITS_OWN * (term @ term):
            found.append(name)
    return found


def _list_calls(kernels: Samples, model: projection.Model) -> list[tuple]:
    """Each kernel, and their sum, of each call."""
    calls = record.group_by(kernels, lambda one: (one.variant, one.mode, one.chunk_size))
    return [(variant, DIRECTIONS.get(mode, mode), chunk, name, *_project(model, part, _HOPPER))
            for (variant, mode, chunk), of in calls.items() for name, part in (*((one.what, [one]) for one in of), ("all", of))]


def _project(model: projection.Model, kernels: Samples, keys: tuple[str, ...]) -> tuple[str, list[float]]:
    """The term that the model has most of the kernels' time from; and their time on each GPU, measured or carried over."""
    parts = Counter()
    for one in kernels:
        parts.update(model.parts_us(one))
    return max(parts, key=parts.get), [sum(one.us if GPUS[key] is model.gpu else model.project_us(one, GPUS[key])
                                           for one in kernels) for key in keys]


def _name_gpus(measured: GPU, keys: tuple[str, ...]) -> list[str]:
    return [f"{GPUS[key].name}, {'measured' if GPUS[key] is measured else 'extrapolated'}" for key in keys]


def list_sheet() -> list[tuple[str, str, str, str, str]]:
    """The GPU table with a source for each number."""
    lines = []
    for gpu in GPUS.values():
        cells = (("SMs", gpu.sms, ""), ("memory", gpu.hbm_gbps, " GB/s"), ("dense bf16", gpu.bf16_tflops, " TFLOP/s"),
                 ("FP32", gpu.fp32_tflops, " TFLOP/s"), ("L2", gpu.l2_mb, " MB"), ("FP32 lanes an SM", gpu.fp32_lanes, ""))
        lines += [(gpu.name, what, f"{cell.value:g}{unit}", cell.confidence, cell.source) for what, cell, unit in cells]
        lines.append((gpu.name, "exponentials", f"{gpu.exps_per_s / 1e12:.2f} T/s", "derived",
                      f"{EXPS_PER_CLOCK} a clock and SM, at the clock that the FP32 rate implies"))
    return lines
