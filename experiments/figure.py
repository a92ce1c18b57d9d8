"""The figure of all shapes, time of each variant beside mamba_ssm's and the bandwidth bound; and what all figures share."""

import hashlib
import io
import json
import re
from pathlib import Path

from . import palette, record
from .shapes import DIRECTIONS, NAMED, WORKLOADS

WIDTH = 6  # inches: scaled to a phone's 360 pixels, text of 11 points is 9 pixels high
_MARKERS = {"mamba_ssm": "o", "fla": "s"}
_OURS = "D"
_BOUND = "bandwidth bound"


def points(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """{mode: {shape: {variant: microseconds}}}, and of the bandwidth bound: the ideal bytes at the run's copy rate.

    Times are those in a CUDA graph where one could be captured, so that launch overhead does not hide the kernels.
    """
    order = [shape.name for shape in (*NAMED, *WORKLOADS)]
    result = {mode: {name: {} for name in order} for mode in DIRECTIONS}
    for row in rows:
        if row["mode"] in result and row["shape"] in order:
            here = result[row["mode"]][row["shape"]]
            here[row["variant"]] = record.get_us(row)
            here[_BOUND] = row["ideal_bytes"] / row["copy_gbps"] / 1e3
    return {mode: {name: times for name, times in shapes.items() if times} for mode, shapes in result.items()}


def compute_fingerprint(shown: dict) -> str:
    """Changes when what a figure shows does. Kept in the SVG: the rest of it depends on matplotlib's version."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def read_fingerprint(path: Path) -> str | None:
    """The fingerprint in a figure on disk; None if there is no figure."""
    found = re.search(r"rows ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found and found[1]


def draw(rows: list[dict], path: Path) -> None:
    """Write the SVG: a panel for each direction, a line for each shape, both on one logarithmic axis."""
    plt = pyplot()
    panels = points(rows)
    heights = [1 + len(shapes) for shapes in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(WIDTH, 1 + 0.4 * sum(heights)), layout="constrained", sharex=True,
                                height_ratios=heights)
    present = {name for shapes in panels.values() for times in shapes.values() for name in times}
    styles = [(name, colour) for name, colour in palette.VARIANTS.items() if name in present]
    for ax, (mode, shapes) in zip(axes, panels.items(), strict=True):
        for y, times in enumerate(reversed(shapes.values())):
            ax.hlines(y, min(times.values()), max(times.values()), color=palette.MUTED, linewidth=1, alpha=0.5, zorder=1)
            ax.plot(times[_BOUND], y, "|", color=palette.INK, markersize=13, markeredgewidth=2, label=_BOUND, zorder=2)
            for n, (name, colour) in enumerate(styles):
                if name in times:  # beside, not upon, others that take as long
                    above = 0.13 * ((len(styles) - 1) / 2 - n)
                    ax.plot(times[name], y + above, _MARKERS.get(name, _OURS), color=colour, markersize=6, label=name, zorder=3)
        ax.set(xscale="log", yticks=range(len(shapes)), yticklabels=[*shapes][::-1])
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_title(DIRECTIONS[mode], loc="left")
        ax.grid(axis="x", which="both", linewidth=0.5)
        ax.set_axisbelow(True)
        hide_frame(ax)
        ax.tick_params(labelbottom=True)
    axes[-1].set_xlabel("µs")
    save(figure, path, panels, legend_columns=3)


def pyplot():
    """matplotlib's, so set that a figure is the same file wherever it is drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= palette.make_style() | {"font.size": 11}
    import matplotlib.pyplot as plt

    return plt


def hide_frame(ax) -> None:
    """Hide the frame, but not the axis below."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False)


def save(figure, path: Path, shown: dict, legend_columns: int = 0) -> None:
    """As SVG that is light or dark as its reader prefers, with the fingerprint of what it shows.

    legend_columns: of a legend of all that has a label, each label once; 0: none.
    """
    if legend_columns:
        labelled = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in figure.axes]
        handles = {label: handle for of_ax in labelled for handle, label in of_ax}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=legend_columns, frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True,
                   metadata={"Date": None, "Description": f"rows {compute_fingerprint(shown)}"})
    path.write_text(palette.follow_reader(drawn.getvalue()))
    pyplot().close(figure)
