"""Writes the tables that variant "auto" chooses by, ssd/configs/variants/<gpu>.json, from committed rows."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from ssd.auto_variant import TABLES, Measured
from ssd.registry import list_candidates
from ssd.runtime.tuning import device_slug

from . import record
from .shapes import ITEMSIZES

_MODES = ("fwd", "bwd")


def rank_variants(rows: list[dict]) -> dict[str, dict[str, list[str]]]:
    """{gpu: {key of ssd.auto_variant.Measured: variants, the fastest first}}.

    Only the last commit's rows with every option at its default count, and only where two variants or more were measured:
    by their times in a CUDA graph, since which kernels are faster does not depend on the host that launches them.
    """
    times: dict[str, dict[Measured, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    wanted = [row for row in rows
              if row["mode"] in _MODES and row["variant"] in list_candidates() and record.has_default_options(row)]
    last = {(row["gpu"], _describe_call(row)): row["git_sha"] for row in wanted}  # rows come oldest first
    for row in wanted:
        if row["git_sha"] == last[row["gpu"], _describe_call(row)]:
            times[device_slug(row["gpu"])][_describe_call(row)][row["variant"]] = row["graph_p50_us"] or row["p50_us"]
    return {
        gpu: {m.key(): sorted(of, key=of.get) for m, of in calls.items() if len(of) > 1} for gpu, calls in times.items()
    }


def write_tables(found: dict[str, dict[str, list[str]]], folder: Path = TABLES) -> list[Path]:
    """Replaces the table of each GPU that has one; a GPU where nothing was compared gets none."""
    paths = []
    for gpu, table in found.items():
        if table:
            folder.mkdir(exist_ok=True)
            path = folder / f"{gpu}.json"
            lines = (f"  {json.dumps(key)}: {json.dumps(order)}" for key, order in sorted(table.items()))
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            paths.append(path)
    return paths


def _describe_call(row: dict) -> Measured:
    return Measured(row["mode"], ITEMSIZES[row["dtype"]], row["headdim"], row["dstate"], row["batch"] * row["nheads"],
                    row["seqlen"], row["chunk_size"])
