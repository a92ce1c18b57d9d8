"""The versions of torch and Triton that the package takes, and those that it is tested with."""

from __future__ import annotations

import re
import warnings
from importlib import import_module

TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}  # package: oldest and newest; pyproject.toml has the same


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version: "3.7.1+git12ab" is (3, 7)."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def describe_tested(package: str) -> str:
    """The versions that the package is tested with, as messages have them: "3.6 to 3.9"."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED[package])


def check() -> None:
    """Warns of a torch or Triton that is newer than those tested.

    Raises:
        ImportError: one is missing or older; the message names what came and what is accepted.
    """
    for package, (oldest, newest) in TESTED.items():
        accepted = f"expected {package} {oldest[0]}.{oldest[1]} or newer (tested: {describe_tested(package)})"
        try:
            version = import_module(package).__version__
        except ModuleNotFoundError as error:
            raise ImportError(f"{package} is not installed, {accepted}") from error
        if release(version) < oldest:
            raise ImportError(f"got {package} {version}, {accepted}")
        if release(version) > newest:
            warnings.warn(f"ssd is untested with {package} {version}: tested are {describe_tested(package)}", stacklevel=2)
