"""Time and memory over the sequence length, in the range of arXiv:2511.22849: 64 to 16384 tokens."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

from ... import table
from ...shapes import DIRECTIONS
from .. import components
from ..definitions import keep_one_gpu
from . import draw
from .parts import NOT_YET, Figure, Section, to_cell

_SWEEP = "sweep-"
_BLOCKS = {"mamba1": "Mamba-1", "mamba2": "Mamba-2"}
# what components are summed to
_KINDS = {"projections": ("in_proj", "x_proj", "dt_proj", "out_proj"), "convolution": ("conv1d",), "SSM": ("ssm",),
          "norm": ("norm",)}
_AXES = {"xscale": "log", "yscale": "log", "xlabel": "tokens"}


def section(out: Path) -> Section:
    """Of the SSD operator, and of the components of blocks."""
    return Section("Scaling with the sequence length", (*_operator(out), *_components(out)))


def _operator(out: Path) -> tuple[str | Figure, ...]:
    rows = sorted((row for row in table.read_latest(out) if row["shape"].startswith(_SWEEP) and row["mode"] in DIRECTIONS),
                  key=lambda row: row["seqlen"])
    if not rows:
        return (f"Of the SSD operator: {NOT_YET}.",)
    data = [{"variant": row["variant"], "mode": row["mode"], "seqlen": row["seqlen"], "chunk_size": row["chunk_size"],
             "us": row["graph_p50_us"] or row["p50_us"], "eager_us": row["p50_us"], "peak_mib": row["peak_mib"],
             "floor_us": row["ideal_bytes"] / row["copy_gbps"] / 1e3} for row in rows]
    groups = list(dict.fromkeys((line["variant"], line["mode"]) for line in data))

    def of(variant: str, mode: str) -> list[dict]:
        return [line for line in data if (line["variant"], line["mode"]) == (variant, mode)]

    def plot(ax, key: str) -> None:
        for variant, mode in groups:
            lines = of(variant, mode)
            ax.plot([line["seqlen"] for line in lines], [line[key] for line in lines], "o-" if mode == "fwd" else "s--",
                    color=draw.colour(variant), markersize=3, linewidth=1, label=f"{variant}, {DIRECTIONS[mode]}")
        ax.grid(which="major")

    time = draw.chart(lambda ax: plot(ax, "us"), 3.4, ylabel="µs in a CUDA graph", **_AXES)
    memory = draw.chart(lambda ax: plot(ax, "peak_mib"), 3.4, ylabel="MiB at most", **_AXES)
    times = data[-1]["seqlen"] / data[0]["seqlen"]
    see_time = (f"For {times:,.0f} times the tokens the time grows less: {_growth(data, 'us')}. Short sequences leave most of "
                "the GPU idle, and a launch has its price; from there on each line is straight.")
    see_memory = f"For {times:,.0f} times the tokens, memory beyond the inputs grows: {_growth(data, 'peak_mib')}."
    note = "mamba2-2.7b's sizes at batch 1, bf16, each variant at the chunk size that is fastest at that length."
    return note, Figure("scaling-time", time, see_time, data), Figure("scaling-memory", memory, see_memory, data)


def _growth(data: list[dict], key: str) -> str:
    """Of each variant and mode, the longest sequence over the shortest; of those alone that are measured at both."""
    ends, parts = (data[0]["seqlen"], data[-1]["seqlen"]), []
    for variant, mode in dict.fromkeys((line["variant"], line["mode"]) for line in data):
        values = {line["seqlen"]: line[key] for line in data if (line["variant"], line["mode"]) == (variant, mode)}
        if ends[0] in values and ends[1] in values:
            parts.append(f"{variant} {DIRECTIONS[mode]} {to_cell(values[ends[1]] / values[ends[0]])} times")
    return ", ".join(parts) or NOT_YET


def _components(out: Path) -> tuple[str | Figure, ...]:
    rows = keep_one_gpu(components.read_latest(out))
    dtype = Counter(row["dtype"] for row in rows).most_common(1)[0][0] if rows else None
    data = _summed([row for row in rows if row["dtype"] == dtype])
    if not data:
        return (f"Of the components of a Mamba-1 and a Mamba-2 block: {NOT_YET}; `make scaling` on a GPU writes the rows.",)
    note = (f"The components of a block of mamba-1.4b and of mamba2-1.3b, each alone, batch 1, in {dtype}: inference is the "
            "forward, training forward and backward; in a CUDA graph, or eagerly what cannot be captured. Mamba-1 gates inside "
            "its scan, and has no norm. A component is left out until all of its parts are measured.")
    return (note, _time(data, "training"), _time(data, "inference"), _memory(data))


def _summed(rows: list[dict]) -> list[dict]:
    """A line for each block, kind of component, phase and length that all components of the kind have a time of."""
    found = []
    groups = dict.fromkeys((row["seqlen"], row["mode"]) for row in rows)
    for (seqlen, mode), name, (kind, parts) in product(groups, _BLOCKS, _KINDS.items()):
        have = [row for row in rows if row["part"] in parts
                and (row["seqlen"], row["mode"], row["shape"]) == (seqlen, mode, name)]
        wanted = sum((name, part) in components.COMPONENTS for part in parts)
        if wanted and len(have) == wanted:
            found.append({"block": _BLOCKS[name], "component": kind, "phase": components.MODES[mode], "seqlen": seqlen,
                          "us": sum(row["graph_p50_us"] or row["p50_us"] for row in have),
                          "eager_us": sum(row["p50_us"] for row in have), "peak_mib": sum(row["peak_mib"] for row in have)})
    return found


def _plot(ax, data: list[dict], key: str) -> None:
    for (block, kind), shade in zip(product(_BLOCKS.values(), _KINDS), 2 * draw.SERIES[: len(_KINDS)], strict=True):
        lines = [line for line in data if (line["block"], line["component"]) == (block, kind)]
        if lines:
            ax.plot([line["seqlen"] for line in lines], [line[key] for line in lines], "s--" if block == "Mamba-1" else "o-",
                    color=shade, markersize=3, linewidth=1, label=f"{block}, {kind}")
    ax.grid(which="major")


def _time(data: list[dict], phase: str) -> Figure:
    data = [line for line in data if line["phase"] == phase]
    svg = draw.chart(lambda ax: _plot(ax, data, "us"), 3.6, ylabel="µs", **_AXES)
    return Figure(f"scaling-{phase}", svg, f"{phase.capitalize()}: {_shares(data, 'us')}.", data)


def _memory(data: list[dict]) -> Figure:
    data = [line for line in data if line["phase"] == "training"]
    svg = draw.chart(lambda ax: _plot(ax, data, "peak_mib"), 3.6, ylabel="MiB at most", **_AXES)
    see = f"Memory beyond the inputs, in training, the most that each component holds: {_shares(data, 'peak_mib')}."
    return Figure("scaling-components-memory", svg, see, data)


def _shares(data: list[dict], key: str) -> str:
    """Of the SSM in each block, at the shortest and at the longest sequence."""
    said = []
    for block in dict.fromkeys(line["block"] for line in data):
        lengths = sorted({line["seqlen"] for line in data if line["block"] == block})
        at = []
        for seqlen in (lengths[0], lengths[-1]):
            lines = [line for line in data if (line["block"], line["seqlen"]) == (block, seqlen)]
            ssm = sum(line[key] for line in lines if line["component"] == "SSM")
            at.append(f"{100 * ssm / sum(line[key] for line in lines):.0f} % at {seqlen:,} tokens")
        said.append(f"the SSM has {' and '.join(at)} of {block}'s components")
    return ", ".join(said)
