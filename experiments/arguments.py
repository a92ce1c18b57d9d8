"""What commands share in reading their options: lists of names, shapes, folders of rows. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from .names import refuse_unknown, suggest, variant_names
from .shapes import CHUNK_SIZES, ITEMSIZES, MODES, Shape, find_shapes
from .terminal import refuse

if TYPE_CHECKING:
    from ssd import Options

VARIANTS = ("auto", *variant_names())
VARIANT_LIST = ", ".join(VARIANTS)
ShapeOption = Annotated[str, typer.Option(help="Shapes, of named, workloads, sweep, models, or single ones of theirs.")]
ModeOption = Annotated[str, typer.Option(help=f"Modes, of {', '.join(MODES)}.")]
DtypeOption = Annotated[str, typer.Option(callback=lambda dtype: check_name("--dtype", dtype, ITEMSIZES),
                                          help=f"Dtype of activations: {', '.join(ITEMSIZES)}.")]
RepeatsOption = Annotated[int, typer.Option(min=2, help="Timed calls of each candidate; candidates take turns.")]
WarmupOption = Annotated[int, typer.Option(min=1, help="Calls of each candidate before timing.")]
_FOLDER = "Folder of the rows: <out>/<gpu>/<bench>.jsonl."
RowsOption = Annotated[Path, typer.Option(file_okay=False, help=_FOLDER)]  # where rows are read
OutOption = Annotated[Path, typer.Option(file_okay=False, help=_FOLDER, callback=lambda out: require_writable(out))]
WideOption = Annotated[bool, typer.Option("--wide", help="Show every column, beyond 100 characters.")]
CountersOption = Annotated[bool, typer.Option(help="Also read DRAM traffic, blocks and pipes of each kernel with ncu.")]


def has_gpu() -> bool:
    """Whether torch sees a GPU. Without one, Triton, which must not be imported before, will interpret kernels."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    return torch.cuda.is_available()


def require_gpu(command: str, instead: str = "") -> None:
    """Refuses the command where there is no GPU. instead: what can be run in its place."""
    if not has_gpu():
        refuse(f"{command}: needs a CUDA GPU, found none{instead and '; '}{instead}")


def require_writable(out: Path) -> Path:
    """Refuses a folder of rows that cannot be made or written to, before anything is measured for it."""
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    try:  # os.access says yes to root even where nothing can be made, as in /proc
        with TemporaryDirectory(dir=nearest):
            return out
    except OSError:
        refuse(f"--out: got {out}, expected a folder that can be written: {nearest} cannot")


def split_names(option: str, text: str, known: Iterable[str], *also: str) -> list[str]:
    """The items of a comma-separated list, each once; refused if one is not known. also: names that the caller accepts."""
    known = list(known)
    items = list(dict.fromkeys(text.split(",")))
    for item in items:
        if item not in known:
            refuse(f"{option}: got {item!r}, expected any of {', '.join((*known, *also))}{suggest(item, known)}")
    return items


@contextmanager
def refusing(prefix: str = "", *also: type[Exception]) -> Iterator[None]:
    """Refuses what is raised within for what came from outside: settings, files, packages; also: exceptions besides."""
    try:
        yield
    except (ImportError, OSError, ValueError, *also) as reason:
        refuse(f"{prefix}{reason}")


def check_name(option: str, name: str, known: Iterable[str]) -> str:
    """The name; refused if it is not known."""
    with refusing():
        refuse_unknown(option, name, known)
    return name


def split_shapes(names: str) -> list[Shape]:
    """As `find_shapes`; an unknown name is refused."""
    with refusing("--"):
        return find_shapes(names)


def split_chunk_sizes(text: str) -> tuple[int, ...]:
    """Chunk sizes of a list; `auto` stands for CHUNK_SIZES."""
    if text == "auto":
        return CHUNK_SIZES
    return tuple(map(int, split_names("--chunk-size", text, [str(2**n) for n in range(4, 9)], "auto")))


def parse_options(items: list[str] | None) -> Options:
    """`ssd.Options` with the fields of NAME=true and NAME=false set, and of keep_bytes=NUMBER."""
    from dataclasses import fields

    from ssd import Options

    names, changed, values = [f.name for f in fields(Options)], {}, {"true": True, "false": False}
    for item in items or ():
        name, _, value = item.partition("=")
        if name == "keep_bytes" and value.isdecimal():
            changed[name] = int(value)
        elif name in names and name != "keep_bytes" and value in values:
            changed[name] = values[value]
        else:
            refuse(f"--option: got {item!r}, expected NAME=true, NAME=false or keep_bytes=NUMBER with a name of "
                   f"{', '.join(names)}{suggest(name, names) if name not in names else ''}")
    return Options(**changed)


def read_rows(read: Callable[[], list[dict]], out: Path) -> list[dict]:
    """What `read` gives; refused where `out` is no folder, or a line in it is no row."""
    if not out.is_dir():
        refuse(f"--out: got {out}, expected a folder that exists")
    with refusing("--out: "):
        return read()


