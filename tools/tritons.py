"""Versions of Triton beside the locked one, which `make test` compiles every kernel with as well.

    python -m tools.tritons 3.8.0,3.9.0

installs PINNED and the versions named, or all, each into a folder `triton-<version>` of the environment, or of $TRITONS. A
process whose PYTHONPATH begins with one has that Triton in place of the locked one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PINNED = ("3.6.0", "3.9.0")  # the oldest and the newest that pyproject.toml takes
CHIPS = dict(zip(PINNED, ((80, 90, 120), (90, 100)), strict=True))  # for which tests use these, unless --triton is given
ALL = ("3.6.0", "3.8.0", "3.9.0")  # of those between, the last of each minor version, but for the locked one


def find_folder(version: str) -> Path:
    return Path(os.environ.get("TRITONS") or sys.prefix) / f"triton-{version}"


def explain_missing(version: str) -> str | None:
    """Why there is no such Triton; None if there is."""
    if (find_folder(version) / "triton").is_dir():
        return None
    return f"Triton {version} is not installed: python -m tools.tritons {version}"


def make_environment(version: str | None) -> dict[str, str]:
    """That of a process that compiles with this version, or with the locked one: kernels are not interpreted there."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if version:
        variables["PYTHONPATH"] = os.pathsep.join([str(find_folder(version)), *filter(None, [variables.get("PYTHONPATH")])])
    return variables


def parse_versions(text: str) -> tuple[str, ...]:
    """What --triton is given: "3.6.0,3.9.0", or "all"."""
    return ALL if text == "all" else tuple(text.split(","))


def install(version: str) -> bool:
    """Whether the version is there afterwards."""
    if explain_missing(version):
        partial = find_folder(version).with_suffix(".partial")  # what is broken off must not be taken for whole
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        if subprocess.run([*pip, "--target", str(partial), f"triton=={version}"]).returncode:
            return False
        partial.rename(find_folder(version))
    return True


if __name__ == "__main__":
    wanted = {*PINNED, *(version for text in sys.argv[1:] for version in parse_versions(text))}
    absent = [version for version in sorted(wanted) if not install(version)]
    if absent:
        print(f"Triton {', '.join(absent)} could not be installed: tests that compile with it are skipped")
