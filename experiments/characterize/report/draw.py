"""Charts by matplotlib as SVG text that takes its colours from the page, so that they follow light and dark."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ...palette import GRID, MUTED, SERIES, THEME, VARIANTS, follow_reader, make_style

_WIDTH = 4.1  # inches: text of 8 points is then 9 pixels on a phone
_LEGEND = 62  # characters that a line of the legend holds, with six for each mark


def colour(variant: str) -> str:
    """A variant's colour, the same in every chart."""
    return VARIANTS.get(variant, VARIANTS["auto"])


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        plot: draws on the axes that it is given.
        data: what it draws, a dict for each line of the CSV.
        height: inches.
        axes: what is set on the axes afterwards.
    """

    plot: Callable
    data: list[dict]
    height: float = 3.0
    axes: dict = field(default_factory=dict)


def chart(panels: dict[str, Panel]) -> str:
    """The SVG of panels, one below the other, with one legend; their titles are shown where there are several."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = make_style() | {"font.size": 8, "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False,
                            "axes.axisbelow": True, "legend.frameon": False}
    heights, handles = [panel.height for panel in panels.values()], {}
    with plt.rc_context(style):
        figure, axes = plt.subplots(len(panels), figsize=(_WIDTH, sum(heights)), layout="constrained", squeeze=False,
                                    height_ratios=heights)
        for ax, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
            panel.plot(ax)
            ax.set(**panel.axes)
            ax.minorticks_off()  # a logarithmic axis would write over itself
            for axis in (ax.xaxis, ax.yaxis):
                if axis.get_scale() == "log":
                    axis.set_major_formatter("{x:,g}")  # an exponent would be too small for a phone
            if len(panels) > 1:
                ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
            handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        if handles:
            columns = _LEGEND // (max(map(len, handles)) + 6)
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=max(1, min(len(handles), columns)))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        plt.close(figure)
    return _inline(text.getvalue())


def plot_bars(ax, labels: list[str], series: dict[str, list[float | None]]) -> None:
    """Horizontal bars, a group for each label, the first on top, with their values beside them; None leaves a gap."""
    thick = 0.8 / len(series)
    for n, ((name, values), shade) in enumerate(zip(series.items(), SERIES, strict=False)):
        at = [y + 0.4 - thick * (n + 0.5) for y in reversed(range(len(labels)))]
        known = [(y, value) for y, value in zip(at, values, strict=True) if value is not None]
        ax.barh([y for y, _ in known], [value for _, value in known], thick * 0.9, color=shade,
                label=name if len(series) > 1 else None)
        for y, value in known:
            ax.annotate(f"{value:,.0f}", (value, y), (3, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(labels)), labels[::-1])
    ax.grid(axis="x")
    ax.margins(x=0.12)
    ax.tick_params(left=False)


def stack(ax, labels: list[tuple[str, str]], series: dict[str, list[float]], pale: str) -> None:
    """Horizontal bars of parts that add up, the first on top.

    labels: (title, name) of each; a title stands above the first bar that has it, so that bars have the width.
    pale: the part that is drawn as none, hatched.
    """
    at = [-line for line in place_lines(labels)]
    left, shades = [0.0] * len(labels), iter(SERIES)
    for name, values in series.items():
        look = {"facecolor": GRID, "hatch": "////", "edgecolor": MUTED, "linewidth": 0} if name == pale else {
            "color": next(shades)}
        ax.barh(at, values, 0.7, left=left, label=name, **look)
        left = [a + b for a, b in zip(left, values, strict=True)]
    first = {title: y for y, (title, _) in [*zip(at, labels, strict=True)][::-1]}
    for title, y in first.items():
        ax.annotate(title, (0, y + 0.5), (-52, 0), textcoords="offset points", va="bottom")
    ax.spines["left"].set_visible(False)
    ax.set_yticks(at, [name for _, name in labels])
    ax.set_ylim(min(at) - 0.6, 0.4)
    ax.tick_params(left=False)


def place_lines(labels: list[tuple[str, str]]) -> list[int]:
    """The line of each bar from above, where a new title takes one: 1, 2, 4 of two with one title and one with another."""
    lines, line, above = [], -1, None
    for title, _ in labels:
        line, above = line + 1 + (title != above), title
        lines.append(line)
    return lines


def make_standalone(svg: str) -> str:
    """The figure as a file of its own, dark for a reader who prefers dark pages."""
    for light, (name, _) in THEME.items():
        svg = svg.replace(f"var({name})", light)
    return follow_reader(svg)


def _inline(svg: str) -> str:
    """The SVG without headers and size, to stand inside a page."""
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r'(<svg [^>]*?)width="[\d.]+pt" height="[\d.]+pt"|(<svg [^>]*?)height="[\d.]+pt"([^>]*?)width="[\d.]+pt"',
                 lambda found: found[1] or found[2] + found[3], svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    for light, (name, _) in THEME.items():
        svg = svg.replace(light, f"var({name})")
    return svg
