"""The versions of torch and Triton that the package takes, and those that it is tested with. Imports neither."""

from __future__ import annotations

import re
import warnings
from importlib import import_module

# (package: oldest, newest tested), each (major, minor); pyproject.toml says the same
TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version: "3.7.1+git12ab" is (3, 7)."""
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups()))
