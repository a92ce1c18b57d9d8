"""What calls would take on other GPUs, and how far the models that say so were off where they were put to the test."""

import math
from collections.abc import Iterable
from itertools import permutations

from ... import palette
from ...shapes import DIRECTIONS, MODELS
from .. import calls, frozen, projection
from ..gpus import EXPS_PER_CLOCK, GPUS
from . import draw
from .figure import Figure

ENOUGH = 2 * len(projection.CONSTANTS)
LIMITS = projection.Errors(median=0.10, weighted=0.12, worst=0.35)
_NEXT = "b200"  # which nobody here has measured
_SHAPES = ("8b-b4", "2.7b-b4")
_SETTLES = ("sweep-64", "sweep-512", "sweep-4096", "graphs", "vision-196", "8b-b1", "8b-b4", "2.7b-b4", "130m-b8")
Outcomes = list[projection.Outcome]


def collect(rows: list[dict]) -> dict:
    """The first predictions, the fits, their tests, and times on a GPU that was not measured; nothing without a GPU that has
    enough calls.
    """
    samples, memory = projection.read_calls(rows), projection.read_memory(rows)
    of_gpus = {key: [one for one in samples if one.gpu == key] for key in GPUS}
    measured = sorted((key for key, of in of_gpus.items() if len(of) >= ENOUGH), key=lambda key: -len(of_gpus[key]))
    if not measured:
        return {}
    fitted = {key: projection.choose_fitted(of_gpus[key]) for key in measured}
    models = {key: projection.fit(of, memory[key]) for key, of in fitted.items()}
    tests = {(source, target): projection.predict_across(samples, memory, source, target)
             for source, target in permutations(measured, 2)}
    first, steps = frozen.compare(samples), projection.read_steps(rows)
    figures = {}
    if first:
        figures["projection-first"] = _plot({"first model": first}, "µs measured on the H100")
    if tests:
        named = {f"{GPUS[source].name} to {GPUS[target].name}": found for (source, target), found in tests.items()}
        figures["projection-test"] = _plot(named, "µs measured")
    known = [one for (source, _), found in tests.items() for one in find_within(found, fitted[source])]
    return {
        "figures": figures, "first": first, "unforeseen": len(of_gpus["h100"]) - len(first),
        "constants": _list_constants(models),
        "counts": {GPUS[key].name: len(of) for key, of in fitted.items()},
        "tests": [(GPUS[source].name, GPUS[target].name, what, part, projection.summarise(part))
                  for source in measured for target in measured
                  for what, part in (*_divide(tests.get((source, target), []), fitted[source]),
                                     ("the operator in training steps",
                                      _predict_steps(steps, models[source], source, target, memory))) if part],
        "worst": {key: max(found, key=lambda one: abs(one.error)) for key, found in tests.items()},
        "missing": [(GPUS[key].name, min(one.us for one in fitted[key]), _list_missing(of_gpus[key])) for key in measured],
        "settles": ",".join(_SETTLES), "limits": LIMITS, "next": GPUS[_NEXT].name,
        "interval": projection.find_interval(known) if known else None,
        "projected": _project(models[measured[0]], measured[0], of_gpus[measured[0]]),
        "source": GPUS[measured[0]].name,
    }


def is_met(errors: projection.Errors) -> bool:
    """True when no error is above its limit."""
    return all(error <= limit for error, limit in zip(errors, LIMITS, strict=True))


def find_within(outcomes: Outcomes, fitted: list[projection.Sample]) -> Outcomes:
    """Those that take no less than what was fitted took: a fit to long calls says little of launches."""
    least = min(one.us for one in fitted)
    return [one for one in outcomes if one.sample.us >= least]


def _divide(found: Outcomes, fitted: list[projection.Sample]) -> list[tuple[str, Outcomes]]:
    """The groups that the table of tests shows apart."""
    models, seen = {shape.name for shape in MODELS}, {one.shape for one in fitted}
    return [("every call", found), ("calls no shorter than those fitted", find_within(found, fitted)),
            ("shapes of published models, which the fit has not seen",
             [one for one in found if one.sample.shape in models - seen])]


def _predict_steps(steps: list[projection.Sample], model: projection.Model, source: str, target: str,
                   memory: dict[str, float]) -> Outcomes:
    return projection.apply(model.carry(GPUS[source], GPUS[target], memory[target]),
                            [one for one in steps if one.gpu == target])


def _plot(outcomes: dict[str, Outcomes], label: str) -> Figure:
    def plot(ax) -> None:
        ax.plot([5, 1e4], [5, 1e4], color=palette.MUTED, linewidth=1)
        for (name, found), marker, shade in zip(outcomes.items(), "os^", palette.SERIES, strict=False):
            ax.plot([one.sample.us for one in found], [one.predicted_us for one in found], marker, color=shade, markersize=4,
                    label=name, alpha=0.6)
        ax.grid(which="major")

    data = [{"test": name, **_list_facts(one)} for name, found in outcomes.items() for one in found]
    axes = {"xscale": "log", "yscale": "log", "xlabel": label, "ylabel": "µs predicted"}
    return Figure(draw.chart({"": draw.Panel(plot, data, 3.6, axes)}), data)


def _list_facts(outcome: projection.Outcome) -> dict:
    one = outcome.sample
    return {"variant": one.variant, "shape": one.shape, "mode": one.mode, "chunk_size": one.chunk_size,
            "measured_us": round(one.us, 2), "predicted_us": round(outcome.predicted_us, 1), "error": round(outcome.error, 3)}


def _list_constants(models: dict[str, projection.Model]) -> list[tuple[str, str, list[str]]]:
    """A line for each constant: meaning, unit, and for each GPU its value and standard error, "open" where that is larger."""
    lines = [("memory: a copy on the device, measured", "GB/s", [f"{model.memory_gbps:,.0f}" for model in models.values()])]
    for n, (name, meaning) in enumerate(projection.CONSTANTS.items()):
        rate = name.startswith("L2")
        values = []
        for value, spread in ((model.constants[n], model.spreads[n]) for model in models.values()):
            known = f"{1e3 / value:,.0f}" if rate else f"{value:.2f}"
            values.append(f"{known} ± {100 * spread:.0f} %" if spread < 1 else
                          f"{known}, open" if math.isfinite(spread) else "no call has it")
        lines.append((f"{name}: {meaning}", "GB/s" if rate else "µs", values))
    return lines


def _list_missing(samples: list[projection.Sample]) -> list[str]:
    """Variants and directions without a row of a GPU."""
    there = {(one.variant, one.mode) for one in samples}
    return [f"{variant} {direction}" for variant in calls.PLAIN + calls.HOPPER for mode, direction in DIRECTIONS.items()
            if (variant, mode) not in there]


def _project(model: projection.Model, source: str, samples: list[projection.Sample]) -> list[tuple]:
    """Calls of the plain kernels, which run on any GPU: here, and outright on the next one."""
    chosen = [one for one in samples if one.variant in calls.PLAIN and one.shape in _SHAPES and one.mode in DIRECTIONS]
    return [(one.sample.variant, DIRECTIONS[one.sample.mode], one.sample.shape, one.sample.chunk_size, one.sample.us,
             one.predicted_us) for one in projection.apply(model.carry(GPUS[source], GPUS[_NEXT]), chosen)]


def list_sheet(measured: Iterable[str]) -> list[tuple[str, str, str, str, str]]:
    """The GPU table with a source for each number: of GPUs with rows, by name, and of the one that is projected."""
    lines = []
    for gpu in (gpu for key, gpu in GPUS.items() if gpu.name in measured or key == _NEXT):
        cells = (("SMs", gpu.sms, ""), ("memory", gpu.hbm_gbps, " GB/s"), ("dense bf16", gpu.bf16_tflops, " TFLOP/s"),
                 ("FP32", gpu.fp32_tflops, " TFLOP/s"), ("L2", gpu.l2_mb, " MB"), ("FP32 lanes an SM", gpu.fp32_lanes, ""))
        lines += [(gpu.name, what, f"{cell.value:g}{unit}", cell.confidence, cell.source) for what, cell, unit in cells]
        lines.append((gpu.name, "exponentials", f"{gpu.exps_per_s / 1e12:.2f} T/s", "derived",
                      f"{EXPS_PER_CLOCK} a clock and SM, at the clock that the FP32 rate implies"))
    return lines
