"""Time and memory over the sequence length, in the range of arXiv:2511.22849: 64 to 16384 tokens."""

from collections import Counter
from collections.abc import Callable
from itertools import product

from ... import palette, record, table
from ...shapes import DIRECTIONS
from .. import components
from . import draw

_SWEEP = "sweep-"
_BLOCKS = {"mamba1": "Mamba-1", "mamba2": "Mamba-2"}
# what components are summed to
_KINDS = {"projections": ("in_proj", "x_proj", "dt_proj", "out_proj"), "convolution": ("conv1d",), "SSM": ("ssm",),
          "norm": ("norm",)}
_COMPONENT_SHADES = dict(zip(product(_BLOCKS.values(), _KINDS), 2 * palette.SERIES[: len(_KINDS)], strict=True))


def collect_operator(rows: list[dict]) -> dict:
    """Times of the SSD operator over the length; nothing without rows. rows: of one GPU."""
    swept = [row for row in table.read_latest(rows) if row["shape"].startswith(_SWEEP) and row["mode"] in DIRECTIONS]
    rows = sorted(swept, key=lambda row: row["seqlen"])
    data = [{"variant": row["variant"], "mode": row["mode"], "seqlen": row["seqlen"], "chunk_size": row["chunk_size"],
             "us": record.get_us(row), "eager_us": row["p50_us"], "peak_mib": row["peak_mib"],
             "floor_us": row["ideal_bytes"] / row["copy_gbps"] / 1e3} for row in rows]
    if not data:
        return {}

    def look(line: dict) -> dict:
        return {"color": draw.colour(line["variant"]), "label": f"{line['variant']}, {DIRECTIONS[line['mode']]}",
                "marker": "o" if line["mode"] == "fwd" else "s", "linestyle": "-" if line["mode"] == "fwd" else "--"}

    return {
        "panels": {"scaling-time": _draw(data, "us", look, "µs in a CUDA graph", 3.4),
                    "scaling-memory": _draw(data, "peak_mib", look, "MiB at most", 3.4)},
        "times": data[-1]["seqlen"] / data[0]["seqlen"], "growth": {key: _growth(data, key) for key in ("us", "peak_mib")}}


def _draw(data: list[dict], key: str, look: Callable[[dict], dict], ylabel: str, height: float = 3.6) -> draw.Panel:
    """A line over the tokens for each look."""
    def plot(ax) -> None:
        for lines in record.group_by(data, lambda line: look(line)["label"]).values():
            ax.plot([line["seqlen"] for line in lines], [line[key] for line in lines], markersize=3, linewidth=1,
                    **look(lines[0]))
        ax.grid(which="major")

    return draw.Panel(plot, data, height, {"xscale": "log", "yscale": "log", "xlabel": "tokens", "ylabel": ylabel})


def _growth(data: list[dict], key: str) -> list[tuple[str, str, float]]:
    """Time of the longest sequence over that of the shortest, for each variant and mode measured at both."""
    ends, found = (data[0]["seqlen"], data[-1]["seqlen"]), []
    for (variant, mode), lines in record.group_by(data, lambda line: (line["variant"], line["mode"])).items():
        values = {line["seqlen"]: line[key] for line in lines}
        if ends[0] in values and ends[1] in values:
            found.append((variant, DIRECTIONS[mode], values[ends[1]] / values[ends[0]]))
    return found


def collect_components(rows: list[dict]) -> dict:
    """Times of the components of blocks over the length; nothing without rows. rows: of one GPU."""
    rows = components.read_latest(rows)
    dtype = Counter(row["dtype"] for row in rows).most_common(1)[0][0] if rows else None
    data = _sum_parts([row for row in rows if row["dtype"] == dtype])
    if not data:
        return {}

    def look(line: dict) -> dict:
        first = line["block"] == "Mamba-1"
        return {"color": _COMPONENT_SHADES[line["block"], line["component"]], "label": f"{line['block']}, {line['component']}",
                "marker": "s" if first else "o", "linestyle": "--" if first else "-"}

    of_phase = {phase: [line for line in data if line["phase"] == phase] for phase in ("training", "inference")}
    return {
        "panels": {**{f"scaling-{phase}": _draw(lines, "us", look, "µs") for phase, lines in of_phase.items()},
                    "scaling-components-memory": _draw(of_phase["training"], "peak_mib", look, "MiB at most")},
        "dtype": dtype, "shares": {phase: _shares(lines, "us") for phase, lines in of_phase.items()},
        "memory": _shares(of_phase["training"], "peak_mib")}


def _sum_parts(rows: list[dict]) -> list[dict]:
    """A line for each block, kind of component, phase and length that all components of the kind have a time of."""
    found = []
    groups = dict.fromkeys((row["seqlen"], row["mode"]) for row in rows)
    for (seqlen, mode), name, (kind, parts) in product(groups, _BLOCKS, _KINDS.items()):
        have = [row for row in rows if row["part"] in parts
                and (row["seqlen"], row["mode"], row["shape"]) == (seqlen, mode, name)]
        wanted = sum((name, part) in components.COMPONENTS for part in parts)
        if wanted and len(have) == wanted:
            found.append({"block": _BLOCKS[name], "component": kind, "phase": components.MODES[mode], "seqlen": seqlen,
                          "us": sum(record.get_us(row) for row in have),
                          "eager_us": sum(row["p50_us"] for row in have), "peak_mib": sum(row["peak_mib"] for row in have)})
    return found


def _shares(data: list[dict], key: str) -> dict[str, list[tuple[float, int]]]:
    """{block: per cent of the SSM, and tokens, of the shortest and of the longest sequence}"""
    found = {}
    for block, lines in record.group_by(data, lambda line: line["block"]).items():
        lengths = sorted({line["seqlen"] for line in lines})
        for seqlen in (lengths[0], lengths[-1]):
            there = [line for line in lines if line["seqlen"] == seqlen]
            ssm = sum(line[key] for line in there if line["component"] == "SSM")
            found.setdefault(block, []).append((100 * ssm / sum(line[key] for line in there), seqlen))
    return found
