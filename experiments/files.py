"""Replaces files in one step: a reader finds the old file or the whole new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.files import flush


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` if the block ends well, and is gone if not."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        flush(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
