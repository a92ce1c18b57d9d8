"""What commands make of their flags: lists of names, shapes, rows; and whether there is a GPU. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .known_names import suggest
from .shapes import CHUNK_SIZES, Shape, find_shapes
from .terminal import refuse, refuse_errors

if TYPE_CHECKING:
    from ssd import Options


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


def split_names(option: str, text: str, known: Iterable[str], *also: str) -> list[str]:
    """The items of a comma-separated list, each once; refused if one is not known. also: names that the caller accepts."""
    known = list(known)
    items = list(dict.fromkeys(text.split(",")))
    for item in items:
        if item not in known:
            refuse(f"{option}: got {item!r}, expected any of {', '.join((*known, *also))}{suggest(item, known)}")
    return items


def split_numbers(option: str, text: str, kind: type = int, below: float = math.inf,
                  expected: str = "positive numbers, as in 64,1024") -> tuple:
    """The numbers of a comma-separated list, more than 0 and less than `below`."""
    with suppress(ValueError):
        numbers = tuple(map(kind, text.split(",")))
        if all(0 < number < below for number in numbers):
            return numbers
    refuse(f"{option}: got {text!r}, expected {expected}")


def split_shapes(names: str) -> list[Shape]:
    """As `find_shapes`; an unknown name is refused."""
    with refuse_errors("--"):
        return find_shapes(names)


def split_chunk_sizes(text: str) -> tuple[int, ...]:
    """Chunk sizes of a list; `auto` stands for CHUNK_SIZES."""
    if text == "auto":
        return CHUNK_SIZES
    return tuple(map(int, split_names("--chunk-size", text, [str(2**n) for n in range(4, 9)], "auto")))


def parse_options(items: list[str] | None, flag: str = "--option") -> Options:
    """`ssd.Options` with the fields of NAME=true and NAME=false set, and of keep_bytes=NUMBER. flag: that errors name."""
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
            refuse(f"{flag}: got {item!r}, expected NAME=true, NAME=false or keep_bytes=NUMBER with a name of "
                   f"{', '.join(names)}{suggest(name, names) if name not in names else ''}")
    return Options(**changed)


def read_rows(read: Callable[[], list[dict]], out: Path) -> list[dict]:
    """What `read` gives; refused where `out` is no folder, or a line in it is no row."""
    if not out.is_dir():
        refuse(f"--out: got {out}, expected a folder that exists")
    with refuse_errors("--out: "):
        return read()


