"""The README's figure: time of each variant beside upstream's and the hardware floor, from rows."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from .shapes import DIRECTIONS, NAMED, WORKLOADS

_MARKERS = {"mamba_ssm": ("o", "#999999"), "fla": ("s", "#c9a227")}
_OURS = ("#0b6e99", "#b5372b", "#3a7d44", "#7b4fa3")


def points(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """{mode: {shape: {variant: microseconds}}}, and `floor`: the ideal bytes at the run's copy rate.

    Times are those in a CUDA graph where one could be captured, so that launch overhead does not hide the kernels.
    """
    order = [shape.name for shape in (*NAMED, *WORKLOADS)]
    result = {mode: {name: {} for name in order} for mode in DIRECTIONS}
    for row in rows:
        if row["mode"] in result and row["shape"] in order:
            here = result[row["mode"]][row["shape"]]
            here[row["variant"]] = row["graph_p50_us"] or row["p50_us"]
            here["floor"] = row["ideal_bytes"] / row["copy_gbps"] / 1e3
    return {mode: {name: times for name, times in shapes.items() if times} for mode, shapes in result.items()}


def fingerprint(shown: dict) -> str:
    """Changes when what a figure shows does. Kept in the SVG: the rest of it depends on matplotlib's version."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(path: Path) -> str | None:
    """The fingerprint in a figure on disk; None if there is no figure."""
    found = re.search(r"rows ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found and found[1]


def draw(rows: list[dict], path: Path) -> None:
    """Writes the SVG: one panel per direction, a line per shape, time on a logarithmic axis."""
    plt = pyplot()
    panels = points(rows)
    height = 1.1 + 0.38 * max(map(len, panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(9, height), layout="constrained")
    ours = dict(zip(sorted(_variants(panels) - _MARKERS.keys()), _OURS, strict=False))
    styles = {name: ("D", colour) for name, colour in ours.items()} | _MARKERS
    for ax, (mode, shapes) in zip(axes, panels.items(), strict=True):
        for y, times in enumerate(reversed(shapes.values())):
            ax.hlines(y, min(times.values()), max(times.values()), color="#dddddd", zorder=1)
            ax.plot(times["floor"], y, "|", color="black", markersize=11, markeredgewidth=2, label="floor", zorder=2)
            for n, (name, (marker, colour)) in enumerate(styles.items()):
                if name in times:  # beside, not upon, others that take as long
                    above = 0.11 * ((len(styles) - 1) / 2 - n)
                    ax.plot(times[name], y + above, marker, color=colour, markersize=5, label=name, zorder=3)
        ax.set(title=DIRECTIONS[mode], xscale="log", xlabel="µs", yticks=range(len(shapes)), yticklabels=[*shapes][::-1])
        ax.grid(axis="x", which="both", color="#f0f0f0")
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, path, panels)


def pyplot():
    """matplotlib's, so set that a figure is the same file wherever it is drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "ssd", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: Path, shown: dict) -> None:
    """As SVG, with the fingerprint of what it shows."""
    figure.savefig(path, metadata={"Date": None, "Description": f"rows {fingerprint(shown)}"})
    pyplot().close(figure)


def _variants(panels: dict) -> set[str]:
    return {name for shapes in panels.values() for times in shapes.values() for name in times} - {"floor"}
