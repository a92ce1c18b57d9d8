"""Writes files and folders through to the disk, so that a new name never shows one that is not there yet."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Write a file, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
