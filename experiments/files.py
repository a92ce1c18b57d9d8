"""Replaces files in one step: a reader finds the old file or the whole new one. And keeps other processes out of a folder."""

from __future__ import annotations

import fcntl
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


def hold_folder(folder: Path) -> int:
    """A descriptor that holds the folder for whoever writes there, until it is closed or the process ends.

    Raises:
        BlockingIOError: another process holds it. File systems without locks let everybody in.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor
