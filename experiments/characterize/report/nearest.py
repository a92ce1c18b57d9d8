"""Which numbers of unfused kernels come nearest to the paper's 57.5 %, and what `fused` and `persistent` use beside them.

The paper says neither which mean its number is nor of which sizes. So each of U, W and G is a candidate, of each call that was
counted and of the SSM kernels in each training step. The more candidates, the nearer one of them comes by chance.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ... import palette, record, sweep
from ...kernel_names import is_of_operator
from ...shapes import DIRECTIONS
from ...workloads import workload_names
from ..definitions import Call, Utilisation, percent_of_peak
from . import bandwidth, draw
from .bandwidth import PAPER_PERCENT
from .figure import shorten

UNFUSED = ("mamba_ssm", "baseline")  # what the paper measured, and ours of the same stages
FUSED = ("fused", "persistent")
_SHOWN_US = (50, 1e4)  # alike for all GPUs
_ORDER = {variant: n for n, variant in enumerate(UNFUSED + FUSED)}
SHAPES = ("8b-b1", "8b-b4", "2.7b-b4")  # that are to be counted


@dataclass(frozen=True)
class Use:
    """What a variant's SSM kernels use of the memory's peak at one place, and how long they take.

    Attributes:
        place: a shape and a direction, or a workload's training step.
        used: per cent of `bandwidth.main_peak`; U and W of a call are without what upstream leaves to torch.
        us: of the call, or of the SSM kernels in the step; None where nobody timed it.
        kernels: per cent of each kernel of a call alone.
    """

    place: str
    variant: str
    used: Utilisation
    us: float | None
    n_bytes: float
    kernels: dict[str, float]

    @property
    def is_step(self) -> bool:
        return not self.kernels


@dataclass(frozen=True)
class Compared:
    """One of FUSED beside an unfused rival at the same place, by one definition."""

    name: str
    use: Use
    rival: Use

    @property
    def values(self) -> tuple[float, float]:
        """Per cent of the rival, and of this one."""
        return getattr(self.rival.used, self.name), getattr(self.use.used, self.name)

    @property
    def above(self) -> float:
        """Points above the paper's number; negative below it."""
        return self.values[1] - PAPER_PERCENT

    @property
    def faster(self) -> float | None:
        return self.rival.us / self.use.us if self.use.us and self.rival.us else None

    @property
    def fewer(self) -> float:
        """Times fewer bytes."""
        return self.rival.n_bytes / self.use.n_bytes

    @property
    def falls(self) -> bool:
        """Whether it uses less of the peak and takes less time, too."""
        return self.values[1] < self.values[0] and (self.faster or 0) > 1


def collect(calls: list[Call], rows: list[dict]) -> dict:
    """What comes nearest, what stands beside it, and where utilisation falls while time falls; nothing without counters of
    unfused kernels. calls, rows: of one GPU.
    """
    of_calls = [_describe_call(call) for call in calls if call.row["mode"] in DIRECTIONS]
    uses = sorted(of_calls + _list_steps(rows), key=lambda use: _ORDER.get(use.variant, len(_ORDER)))
    candidates = [(use, name, value) for use in uses if use.variant in UNFUSED
                  for name, value in use.used._asdict().items() if value is not None]
    if not candidates:
        return {}
    use, name, value = min(candidates, key=lambda candidate: abs(candidate[2] - PAPER_PERCENT))
    alone = [(one, kernel, percent) for one in of_calls if one.variant in UNFUSED for kernel, percent in one.kernels.items()]
    groups = record.group_by(uses, lambda one: one.place)
    places = {place: groups[place] for place in dict.fromkeys([one.place for one in of_calls] + sorted(groups))}
    beside = [Compared(name, one, use) for one in places[use.place] if one.variant in FUSED]
    compared = [Compared(mean_of, one, rival) for found in places.values() if (rival := _find_rival(found))
                for one in found if one.variant in FUSED for mean_of in ("U", "W")]
    panels = {"utilisation-time": _plot(of_calls)} if any(one.us for one in of_calls) else {}
    return {
        "panels": panels, "tables": {"places": list(map(_list_facts, uses))},
        "places": places, "variants": [*dict.fromkeys(one.variant for one in uses)],
        "use": use, "name": name, "value": value, "count": len(candidates),
        "alone": min(alone, key=lambda one: abs(one[2] - PAPER_PERCENT), default=None), "beside": beside, "compared": compared,
        "falls": sorted((one for one in compared if one.falls), key=lambda one: one.values[1] - one.values[0])}


def _find_rival(uses: Iterable[Use]) -> Use | None:
    """The use of upstream's kernels at a place, or else of the baseline's; None if neither was counted there."""
    found = {use.variant: use for use in uses}
    return next((found[variant] for variant in UNFUSED if variant in found), None)


def _describe_call(call: Call) -> Use:
    own = tuple(kernel for kernel in call.kernels if is_of_operator(kernel["kernel"])) or call.kernels
    used = bandwidth.main_peak(replace(call, kernels=own))[1]._replace(G=bandwidth.main_peak(call)[1].G)
    peak = call.peaks.get(bandwidth.DATASHEET)
    kernels = {shorten(kernel["kernel"]): percent_of_peak(kernel["dram_bytes"], kernel["ncu_us"], peak) if peak else
               kernel["dram_pct"] for kernel in own}
    return Use(f"{call.row['shape']} {DIRECTIONS[call.row['mode']]}", call.row["variant"], used, call.wall_us, call.dram_bytes,
               kernels)


def _list_steps(rows: list[dict]) -> list[Use]:
    """Of each kind of step and variant that was counted the last; a step that was timed launch by launch, as ncu counts it,
    before one that was captured.
    """
    counted = [row for row in sweep.read_latest(rows) if row["U"] is not None and record.has_default_options(row)]
    last = {(_name_place(row), row["variant"]): row for row in sorted(counted, key=lambda row: not row.get("graph"))}
    return [Use(place, variant, Utilisation(row["U"], row["W"], row["G"]), row["ssm_us"], row["dram_bytes"], {})
            for (place, variant), row in last.items()]


def _name_place(row: dict) -> str:
    joined = "" if row["run"]["documents"] else ", documents joined"
    compiled = ", compiled" if row["compile"] else ""
    return f"step of {row['workload']} {row['preset']} {row['mixer']}, {row['dtype']}, batch {row['batch']}{joined}{compiled}"


def _plot(uses: list[Use]) -> draw.Panel:
    """Utilisation over time, a line through the variants of each call, the slowest first."""
    timed = [use for use in uses if use.us]

    def plot(ax) -> None:
        for place, of in record.group_by(timed, lambda use: use.place).items():
            line = sorted(of, key=lambda use: -use.us)
            ax.plot([use.us for use in line], [use.used.W for use in line], color=palette.MUTED, linewidth=0.5, zorder=1)
            for use in line:
                look = {"color": draw.colour(use.variant), "linestyle": "", "markersize": 5,
                        "marker": "o" if place.endswith(DIRECTIONS["fwd"]) else "s"}
                ax.plot(use.us, use.used.W, label=use.variant, **look)
                ax.plot(use.us, use.used.U, markerfacecolor="none", **look)
        ax.axhline(PAPER_PERCENT, color=palette.MUTED, linewidth=1, linestyle="--", label=f"{PAPER_PERCENT} %, the paper's")
        ax.grid(which="major")

    axes = {"xscale": "log", "xlabel": "µs of the call", "ylabel": "per cent of the peak", "xlim": _SHOWN_US, "ylim": (0, 100)}
    return draw.Panel(plot, list(map(_list_facts, timed)), 3.2, axes)


def _list_facts(use: Use) -> dict:
    return {"place": use.place, "variant": use.variant, "us": use.us, "dram_mb": use.n_bytes / 1e6, **use.used._asdict()}


def count_above(compared: list[Compared]) -> list[tuple[str, str, int, int, Compared]]:
    """Of each definition and each of FUSED: at how many places it is above the paper's number, of how many, and the highest."""
    groups = record.group_by(compared, lambda one: (one.name, one.use.variant))
    return [(*which, sum(one.above > 0 for one in of), len(of), max(of, key=lambda one: one.above))
            for which, of in sorted(groups.items())]


def list_missing(places: dict[str, list[Use]]) -> list[str]:
    """Of SHAPES in each direction, and of the workloads' steps, those of which not all four variants were counted."""
    def is_whole(place: str) -> bool:
        return {use.variant for use in places[place]} >= {*UNFUSED, *FUSED}

    whole = [place for place in places if is_whole(place)]
    calls = [f"{shape} {direction}" for shape in SHAPES for direction in DIRECTIONS.values()]
    return [call for call in calls if call not in whole] + [
        f"steps of {name}" for name in workload_names() if not any(place.startswith(f"step of {name} ") for place in whole)]
