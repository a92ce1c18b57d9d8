"""Files that are whole or as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Through to the disk, a file or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
