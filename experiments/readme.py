"""The README's results, written between two markers from committed rows, and its figure."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from . import figure, record, table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FIGURE = ROOT / "docs" / "results.svg"
_MODES = {"fwd": "forward", "bwd": "backward"}
_BEGIN, _END = "<!-- results: written by `make readme` -->", "<!-- end of results -->"


def results(rows: list[dict], figure_path: str) -> str:
    """Markdown of the latest rows, the faster chunk size of each variant: losses beside wins."""
    if not rows:
        return "No rows yet: no GPU has run the bench for this table.\n"
    parts = [f"![Time of each variant, of upstream and the floor, per shape]({figure_path})\n"]
    for gpu, group in groupby(rows, lambda row: row["gpu"]):
        group = list(group)
        versions = sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in group})
        copy = sorted(row["copy_gbps"] for row in group)[len(group) // 2]
        parts.append(f"{gpu}, {'; '.join(versions)}, device copy {copy:.0f} GB/s:\n")
        parts.append(_markdown(group))
    return "\n".join(parts)


def update(rows: list[dict], readme: Path = README, figure_path: Path = FIGURE, check: bool = False) -> bool:
    """Whether README and figure already showed these rows; unless `check`, afterwards they do.

    Raises:
        ValueError: the README lacks the markers.
    """
    rows = [row for row in rows if row["mode"] in _MODES]
    text = readme.read_text()
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{readme.name}: expected the lines {_BEGIN!r} and {_END!r} once each")
    link = figure_path.relative_to(readme.parent).as_posix()
    region = f"{_BEGIN}\n\n{results(rows, link)}\n{_END}"
    updated = re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: region, text, flags=re.S)
    current_figure = not rows or figure.drawn_from(figure_path) == figure.fingerprint(rows)
    if not check:
        readme.write_text(updated)
        if not current_figure:
            figure.draw(rows, figure_path)
    return updated == text and current_figure


def committed(out: Path = record.RESULTS) -> list[dict]:
    """The rows that the README shows: named shapes in bf16, each variant as it comes, at its faster chunk size."""
    return [row for row in table.committed(out, dtype="bf16")
            if not row["shape"].startswith("sweep-") and record.has_default_options(row)]


def _markdown(rows: list[dict]) -> str:
    lines = [
        "| shape | | variant | chunk | µs | in a CUDA graph, µs | share of floor | error | against | speed-up |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for row in rows:
        graph = "" if row["graph_p50_us"] is None else f"{row['graph_p50_us']:.0f}"
        speedups = "" if not row.get("against") else " / ".join(
            f"{row[key]:.2f}" for key in ("speedup", "graph_speedup") if row[key])
        floor = row["ideal_bytes"] / row["copy_gbps"] / 1e3
        share = f"{100 * floor / (row['graph_p50_us'] or row['p50_us']):.0f} %"
        error = "" if row["err_rms"] is None else f"{row['err_rms']:.1e}"
        cells = (row["shape"], _MODES[row["mode"]], row["variant"], row["chunk_size"], f"{row['p50_us']:.0f}", graph,
                 share, error, row.get("against") or "", speedups)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
