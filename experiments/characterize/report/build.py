"""Puts the report together and writes it."""

from __future__ import annotations

from pathlib import Path

from ... import record
from .. import definitions
from . import bandwidth, draw, findings, kernels, page, paper, projected, roofline, scaling, steps
from .parts import NOT_YET, Section

_SHAPE, _DTYPE = "8b-b4", "bf16"  # what counters are shown of: the paper's sizes, at a batch that fills a GPU


def sections(out: Path = record.RESULTS) -> list[Section]:
    """Every section, from the rows under `out`."""
    calls = [call for call in definitions.read_calls(out) if (call.row["shape"], call.row["dtype"]) == (_SHAPE, _DTYPE)
             and record.has_default_options(call.row)]
    gpus = [row["gpu"] for row in definitions.keep_one_gpu([call.row for call in calls])]
    calls = [call for call in calls if call.row["gpu"] in gpus]
    return [findings.section(calls, out), paper.section(calls, out), steps.section(out), roofline.section(calls, out),
            kernels.ratios(calls), kernels.table_two(calls), kernels.caches(calls), bandwidth.section(calls),
            scaling.section(out), projected.section(out), _sources(out)]


def write(folder: Path, out: Path = record.RESULTS) -> list[Path]:
    """Writes index.html, report.md, and an SVG and a CSV for each figure; returns the paths, the page first.

    Raises:
        ValueError: a line that is no row.
    """
    found, lines = sections(out), [paper.CITED]
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"index.html": page.html(found, lines), "report.md": page.markdown(found, lines)}
    for figure in (figure for section in found for figure in section.figures):
        texts |= {f"{figure.name}.svg": draw.standalone(figure.svg), f"{figure.name}.csv": figure.csv}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def _sources(out: Path) -> Section:
    rows = [row for row in record.read(out) if row["bench"] not in ("tests", "fuzz")]  # which say nothing of times
    gpus = sorted({row["gpu"] for row in rows if row["gpu"]})
    commits = sorted({row["git_sha"][:7] for row in rows if row["git_sha"]})
    measured = f"measured on {', '.join(gpus)} at the commits {', '.join(commits)}" if gpus else NOT_YET
    return Section("Where the numbers are from", (
        f"`make report` writes this from {len(rows)} rows of `experiments/results`, {measured}. No number here is typed by "
        "hand but those of papers and data sheets, and a matmul's rate from `ssd/cost.py`.",
        f"Counters are of the shape {_SHAPE} in {_DTYPE}, on the GPU with the most of them. A time under ncu weighs kernels "
        "against one another; times of calls are those in a CUDA graph, without a profiler."))
