"""The figure of workloads, from rows: a training step with each variant inside, and the state-space model's part."""

from pathlib import Path

from . import figure, palette, record, sweep

_PALE = 0.35  # of what is not the state-space model's


def points(rows: list[dict]) -> dict[str, dict[str, tuple[float, float | None, float | None]]]:
    """{what is trained, how: {variant as it comes: milliseconds of a step, of the SSM in it, speed-up over mamba_ssm}}

    Where a speed-up was measured, captured if it was so. In the order of what they say; variants in that of `palette.VARIANTS`.
    """
    found: dict[str, dict[str, dict[str, tuple[float, float | None, float | None]]]] = {}
    for row in rows:
        if record.has_default_options(row):
            gpu = row["gpu"].removeprefix("NVIDIA ").split()[0]  # H100, of "NVIDIA H100 80GB HBM3"
            what = f"{gpu}: {row['workload']} {row['preset']} ({row['mixer']}), batch {row['batch']}, {row['dtype']}"
            ssm = None if row["ssm_us"] is None else row["ssm_us"] / 1e3
            of_way = found.setdefault(what, {}).setdefault(sweep.describe_way(row), {})
            of_way[row["variant"]] = row["p50_us"] / 1e3, ssm, row.get("speedup")
    panels = {}
    for what, of_ways in sorted(found.items()):
        for way in (", captured", *of_ways):
            variants = of_ways.get(way, {})
            if any(speedup for *_, speedup in variants.values()):
                panels[what + way] = {name: variants[name] for name in palette.VARIANTS if name in variants}
                break
    return panels


def draw(rows: list[dict], path: Path) -> None:
    """Write the SVG: a panel for each workload, a bar for each variant, dark where it is the state-space model."""
    plt = figure.pyplot()
    panels = points(rows)
    heights = [len(variants) + 1.3 for variants in panels.values()]
    drawn, axes = plt.subplots(len(panels), 1, figsize=(figure.WIDTH, 0.8 + 0.3 * sum(heights)), layout="constrained",
                               squeeze=False, height_ratios=heights)
    for ax, (title, variants) in zip(axes[:, 0], panels.items(), strict=True):
        for y, (name, (step, ssm, speedup)) in enumerate(reversed(variants.items())):
            colour = palette.VARIANTS[name]
            ax.barh(y, step, color=colour, alpha=_PALE)
            ax.barh(y, ssm or 0, color=colour)
            faster = f", {speedup:.2f}x" if speedup else ""
            ax.annotate(f"{step:.0f} ms{faster}", (step, y), (4, 0), textcoords="offset points", va="center", gid=name)
        ax.set_title(title, loc="left", fontsize="medium", x=-0.16)
        ax.margins(x=0.32)
        ax.set(yticks=range(len(variants)), yticklabels=[*variants][::-1], xticks=[])
        figure.hide_frame(ax)
        ax.spines["bottom"].set_visible(False)
    drawn.suptitle("a training step; dark: the state-space model's kernels", fontsize="medium")
    figure.save(drawn, path, panels)
