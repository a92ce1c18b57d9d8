"""What the sections of the report share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pandas as pd

from ... import record
from ..definitions import keep_one_gpu


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        svg: with the names of `palette.THEME` for colours.
        data: its numbers, a dict for each line of the CSV.
    """

    svg: str
    data: list[dict]

    @property
    def csv(self) -> str:
        # as many digits as no sum's order changes: 3.12 adds floats up in another way than 3.11
        cells = [{name: f"{cell:.9g}" if isinstance(cell, float) else cell for name, cell in line.items()}
                 for line in self.data]
        return pd.DataFrame(cells, dtype=object).to_csv(index=False)


def name_run(row: dict) -> str:
    """What a row of a training step is about, for a label."""
    run = row["run"]
    apart = "" if run["documents"] else ", documents joined"
    return f"{row['workload']} {row['preset']} {row['mixer']} {row['variant']}, {row['dtype']}, batch {row['batch']}{apart}"


def keep_last_runs(rows: list[dict], named: Callable[[dict], Hashable] = name_run) -> dict[Hashable, list[dict]]:
    """{what rows are about: its rows}, as it was measured last on the GPU of most rows."""
    return record.keep_last_runs(keep_one_gpu(rows), named)


def shorten(kernel: str) -> str:
    """A kernel's name without the template, arguments and suffix."""
    return kernel.removeprefix("void ").partition("<")[0].removesuffix("_kernel")
