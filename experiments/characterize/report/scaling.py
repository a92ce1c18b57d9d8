"""Time and memory over the sequence length, in the range of arXiv:2511.22849: 64 to 16384 tokens."""

from __future__ import annotations

from pathlib import Path

from ... import table
from . import draw
from .parts import NOT_YET, Figure, Section, number

_SWEEP = "sweep-"
_MODES = {"fwd": "forward", "bwd": "backward"}


def section(out: Path) -> Section:
    """Of the SSD operator alone."""
    title = "Scaling with the sequence length"
    missing = (f"Of the other parts of a block (projections, convolution, norm), of Mamba-1's, and of inference: {NOT_YET}; "
               "`make block SHAPE=sweep` has the parts of ours.")
    rows = sorted((row for row in table.committed(out) if row["shape"].startswith(_SWEEP) and row["mode"] in _MODES),
                  key=lambda row: row["seqlen"])
    if not rows:
        return Section(title, (f"Of the SSD operator: {NOT_YET}.", missing))
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
                    color=draw.colour(variant), markersize=3, linewidth=1, label=f"{variant}, {_MODES[mode]}")
        ax.grid(which="major")

    axes = {"xscale": "log", "yscale": "log", "xlabel": "tokens"}
    time = draw.chart(lambda ax: plot(ax, "us"), 3.4, ylabel="µs in a CUDA graph", **axes)
    memory = draw.chart(lambda ax: plot(ax, "peak_mib"), 3.4, ylabel="MiB at most", **axes)
    parts = []
    for variant, mode in groups:
        first, last = of(variant, mode)[0], of(variant, mode)[-1]
        parts.append(f"{variant} {_MODES[mode]} {number(last['us'] / first['us'], 0)} times")
    times = data[-1]["seqlen"] / data[0]["seqlen"]
    see_time = (f"For {times:,.0f} times the tokens the time grows less: {', '.join(parts)}. Short sequences leave most of the "
                "GPU idle, and a launch has its price; from there on each line is straight.")
    grown = data[-1]["peak_mib"] / data[0]["peak_mib"]
    see_memory = f"Memory beyond the inputs grows with the tokens: {grown:,.0f} times for {data[-1]['variant']}'s backward."
    note = "mamba2-2.7b's sizes at batch 1, bf16, each variant at the chunk size that is fastest at that length."
    return Section(title, (note, Figure("scaling-time", time, see_time, data),
                           Figure("scaling-memory", memory, see_memory, data), missing))
