"""What the sections of the report share."""

from dataclasses import dataclass

import pandas as pd

from . import draw


@dataclass(frozen=True)
class Figure:
    """A chart, or a table too long for the text.

    Attributes:
        svg: with the names of `palette.THEME` for colours; None for a table.
        data: its numbers, a dict for each line of the CSV.
    """

    svg: str | None
    data: list[dict]

    @property
    def csv(self) -> str:
        # as many digits as no sum's order changes: 3.12 adds floats up in another way than 3.11
        cells = [{name: f"{cell:.9g}" if isinstance(cell, float) else cell for name, cell in line.items()}
                 for line in self.data]
        return pd.DataFrame(cells, dtype=object).to_csv(index=False)


def stack_panels(panels: dict[str, draw.Panel]) -> Figure:
    """A panel for each GPU, by its name, which stands in every line of the data as well."""
    return stack_lines({gpu: panel.data for gpu, panel in panels.items()}, draw.chart(panels))


def stack_lines(tables: dict[str, list[dict]], svg: str | None = None) -> Figure:
    """The lines of each GPU, by its name."""
    return Figure(svg, [{"gpu": gpu, **line} for gpu, lines in tables.items() for line in lines])


def name_run(row: dict) -> str:
    """What a row of a training step is about, for a label."""
    run = row["run"]
    apart = "" if run["documents"] else ", documents joined"
    return f"{row['workload']} {row['preset']} {row['mixer']} {row['variant']}, {row['dtype']}, batch {row['batch']}{apart}"


def shorten(kernel: str) -> str:
    """A kernel's name without the template, arguments and suffix."""
    return kernel.removeprefix("void ").partition("<")[0].removesuffix("_kernel")
