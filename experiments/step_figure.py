"""The README's figure of workloads, from rows: a training step with each variant inside, and the state-space model's part."""

from __future__ import annotations

from pathlib import Path

from . import figure, record

_SSM, _REST = "#b5372b", "#c9d3d9"


def points(rows: list[dict]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """{workload, preset and mixer: {variant as it comes: milliseconds of a step, and of the state-space model in it}}"""
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for row in rows:
        if record.has_default_options(row):
            variants = found.setdefault(f"{row['workload']} {row['preset']} ({row['mixer']})", {})
            variants[row["variant"]] = row["p50_us"] / 1e3, None if row["ssm_us"] is None else row["ssm_us"] / 1e3
    return found


def draw(rows: list[dict], path: Path) -> None:
    """Writes the SVG: a panel per workload, a bar per variant, whose dark part is the state-space model's."""
    plt = figure.pyplot()
    panels = points(rows)
    heights = [len(variants) + 1 for variants in panels.values()]
    drawn, axes = plt.subplots(len(panels), 1, figsize=(9, 0.6 + 0.3 * sum(heights)), layout="constrained", squeeze=False,
                               height_ratios=heights)
    for ax, (title, variants) in zip(axes[:, 0], panels.items(), strict=True):
        for y, (name, (step, ssm)) in enumerate(reversed(variants.items())):
            ax.barh(y, step, color=_REST, label="step")
            ax.barh(y, ssm or 0, color=_SSM, label="of it the state-space model")
            ax.text(step, y, f" {step:.0f}", va="center", gid=name)
        ax.set_title(title, loc="left")
        ax.set(yticks=range(len(variants)), yticklabels=[*variants][::-1])
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    axes[-1, 0].set_xlabel("ms")
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.save(drawn, path, points(rows))
