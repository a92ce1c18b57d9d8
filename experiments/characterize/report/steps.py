"""Figure 1: what a training step of each workload spends its time on, from rows of the bench `characterize`."""

from ... import record
from .. import operators
from ..scopes import BACKWARD, FORWARD, OPTIMIZER
from . import draw
from .figure import name_run

# What a bar is made of: few enough that each has a colour of its own.
BARS = {"GEMM": ("gemm",), "SSM": ("ssm",), "convolution": ("conv1d", "conv"), "attention": ("attention",),
         "norm, elementwise, reduce": ("norm", "elementwise", "reduce"),
         "other kernels": ("embedding", "loss", "optimizer", "memcpy", "other"), "idle": ("idle",)}
_ORDER = ("idle", *operators.CLASSES)
_VARIANTS = ("mamba_ssm", "baseline", "fused", "persistent")  # others after them
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)
WAITS = 25  # per cent of a step that is idle, from which on a workload is said to wait for its host


def collect(rows: list[dict]) -> dict:
    """Shares of steps, {`figure.name_run`: {class: per cent of kernels' time and idle time}}, workload by workload; the
    steps by phase; and what there is to say of them. Nothing without rows; rows: of one GPU.
    """
    runs = record.keep_last_runs(record.read(rows, bench="characterize"), name_run)
    runs = dict(sorted(runs.items(), key=lambda run: (_place(run[1][0]), run[0])))
    shares = {name: {kind: _percent(found, operator=kind) for kind in _ORDER} for name, found in runs.items()}
    if not shares:
        return {}
    kinds = [kind for kind in _ORDER if any(values[kind] >= 0.05 for values in shares.values())]
    phases = _split_phases(runs)
    data = [{"run": name, **{kind: round(values[kind], 3) for kind in kinds}, **phases[name]}
            for name, values in shares.items()]
    series = {bar: [sum(values[kind] for kind in of_bar) for values in shares.values()] for bar, of_bar in BARS.items()}
    series = {bar: values for bar, values in series.items() if max(values) >= 0.05}
    labels = [_label(found[0]) for found in runs.values()]
    panel = draw.Panel(lambda ax: draw.stack(ax, labels, series, pale="idle"), data,
                       1.0 + 0.17 * (draw.place_lines(labels)[-1] + 2), {"xlabel": "per cent of the step", "xlim": (0, 100)})
    of_workload = record.group_by((found[0] for found in runs.values()), lambda row: row["workload"])
    idle = {workload: [shares[name_run(row)]["idle"] for row in found] for workload, found in of_workload.items()}
    without = [workload for workload, found in of_workload.items() if all(row["variant"] != "mamba_ssm" for row in found)]
    return {
        "panels": {"operators": panel}, "shares": shares,
        "most": max(shares, key=lambda name: shares[name]["gemm"]),
        "largest": {kind: max(values[kind] for values in shares.values()) for kind in _ORDER},
        "waiting": {workload: _span(found) for workload, found in idle.items() if max(found) > WAITS},
        "idle_elsewhere": max((value for found in idle.values() for value in found if max(found) <= WAITS), default=None),
        "without_upstream": without if len(without) < len(idle) else [], "upstream": _compare_upstream(shares),
    }


def _compare_upstream(shares: dict[str, dict[str, float]]) -> tuple[float, float, str] | None:
    """The largest share of the SSM kernels in a step with mamba_ssm inside, that in the same with `persistent`, and what it is
    a step of; None where no step was profiled with both.
    """
    pairs = [(values["ssm"], shares[other]["ssm"], name.replace(" mamba_ssm,", ",")) for name, values in shares.items()
             if " mamba_ssm," in name and (other := name.replace(" mamba_ssm,", " persistent,")) in shares]
    return max(pairs, default=None)


def _percent(rows: list[dict], **keys: str) -> float:
    """The share of the step, in per cent, of the rows with these values."""
    return 100 * sum(row["share"] for row in rows if all(row[key] == value for key, value in keys.items()))


def _split_phases(runs: dict[str, list[dict]]) -> dict[str, dict[str, float | None]]:
    """Each run's phases and what is between them; last, the SSM kernels' share of forward and backward."""
    found = {}
    for name, run in runs.items():
        kernels = [row for row in run if row["operator"] != "idle"]
        whole = {phase: _percent(kernels, phase=phase) for phase in _PHASES}
        rest = _percent([row for row in kernels if row["phase"] not in _PHASES])
        ssm = {f"ssm of {phase}": 100 * _percent(kernels, phase=phase, operator="ssm") / whole[phase] if whole[phase] else None
               for phase in (FORWARD, BACKWARD)}
        found[name] = {f"in {phase}": share for phase, share in whole.items()} | {"between phases": rest} | ssm
    return found


def _place(row: dict) -> tuple:
    """The place of a row's run in the order."""
    variant = row["variant"]
    return (row["workload"], row["preset"], row["mixer"], _VARIANTS.index(variant) if variant in _VARIANTS else len(_VARIANTS))


def _label(row: dict) -> tuple[str, str]:
    """A bar's title, which the variants of a workload share, and its name."""
    title, _, how = name_run(row).partition(f" {row['variant']}, ")
    return f"{title}, {how}", row["variant"]


def _span(values: list[float]) -> str:
    ends = dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}"))
    return " to ".join(ends)
