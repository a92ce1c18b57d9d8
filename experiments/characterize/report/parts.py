"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..definitions import keep_one_gpu

NOT_YET = "not measured yet"


@dataclass(frozen=True)
class Table:
    """Cells as text. The columns of `names` are no numbers: these are aligned to the left."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    names: int = 1


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        name: of its files, name.svg and name.csv.
        svg: with the colours of `draw.THEME`.
        see: a sentence, what to see in it.
        data: its numbers, a dict for each line of the CSV.
    """

    name: str
    svg: str
    see: str
    data: list[dict]

    @property
    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.data[0]), lineterminator="\n")
        writer.writeheader()
        # as many digits as no sum's order changes: 3.12 adds floats up in another way than 3.11
        writer.writerows({name: f"{cell:.9g}" if isinstance(cell, float) else cell for name, cell in line.items()}
                         for line in self.data)
        return text.getvalue()


@dataclass(frozen=True)
class Section:
    """Paragraphs, figures and tables below a title, in the order in which they are given."""

    title: str
    parts: tuple[str | Figure | Table, ...]

    @property
    def figures(self) -> list[Figure]:
        return [part for part in self.parts if isinstance(part, Figure)]


def to_cell(value: float | None, digits: int = 0) -> str:
    """A cell; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def name_run(row: dict) -> str:
    """What a row of a training step is about, for a label."""
    run = row["run"]
    apart = "" if run["documents"] else ", documents joined"
    return f"{row['workload']} {row['preset']} {row['mixer']} {row['variant']}, {row['dtype']}, batch {row['batch']}{apart}"


def keep_last_runs(rows: list[dict], named: Callable[[dict], Hashable] = name_run) -> dict[Hashable, list[dict]]:
    """{what rows are about: its rows}, as it was measured last on the GPU of most rows."""
    runs: dict[Hashable, list[dict]] = {}
    for row in keep_one_gpu(rows):
        runs.setdefault(named(row), []).append(row)
    return {name: [row for row in found if row["time"] == found[-1]["time"]] for name, found in runs.items()}


def shorten(kernel: str) -> str:
    """A kernel's name without the template, arguments and suffix."""
    return kernel.removeprefix("void ").partition("<")[0].removesuffix("_kernel")
