"""What `make bench VARIANT=persistent SHAPE=8b-b4` prints, as text in docs/terminal.md: without a GPU, and of recorded rows."""

import re
from io import StringIO

from rich.console import Console

from ssd import Options

from . import interpret, record, table
from .result_tables import MODES
from .shapes import find_shapes

VARIANT, AGAINST, SHAPE = "persistent", "mamba_ssm", "8b-b4"
_CHUNK_SIZE, _WIDTH = 256, 100
_ERRORS = re.compile(r"(fp\d\d +)\w+( +)\S+( +)\S+")  # of a judged dtype: where it is worst, and the two errors


def print_without_gpu() -> str:
    """Checks the kernels in Triton's interpreter, which takes seconds; costs are from committed rows."""
    console = _make_console()
    interpret.run([VARIANT], find_shapes(SHAPE), list(MODES), "bf16", _CHUNK_SIZE, [Options()], record.RESULTS, console)
    return _read(console)


def print_recorded_run(rows: list[dict]) -> str:
    """The last rows of the shape on GPUs that have run both, as the bench shows them when it ends."""
    console = _make_console()
    found = [row for row in rows if row["shape"] == SHAPE and row["variant"] in (VARIANT, AGAINST)
             and row["mode"] in MODES and record.has_default_options(row)]
    beside = {row["gpu"] for row in found if row["variant"] == AGAINST}
    table.show(console, [row for row in found if row["gpu"] in beside], "medians")
    return _read(console)


def mask_errors(text: str) -> str:
    """Without what another CPU or torch may round otherwise."""
    return _ERRORS.sub(r"\1...\2...\3...", text)


def _make_console() -> Console:
    return Console(file=StringIO(), width=_WIDTH, force_terminal=False)


def _read(console: Console) -> str:
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "```text\n" + "\n".join(lines).strip() + "\n```\n"
