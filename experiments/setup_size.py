"""How long `make setup` took and how much it installed: python -m experiments.setup_size [--row].

It says so; with --row it also leaves a row, which `make readme` writes into the README. That is of use after a whole set-up
alone, in a fresh clone: the time is that between the first file of the environment and the last.
"""

import os
import sys
from importlib.metadata import distributions
from pathlib import Path

_BLOCK_BYTES = 512  # of `st_blocks`, on every Linux


def measure(environment: Path) -> dict[str, int | float]:
    """Seconds of the set-up, MiB on the disk, packages, and the cores of this machine.

    Raises:
        FileNotFoundError: no environment of `make` is there.
    """
    seconds = (environment / ".installed").stat().st_mtime - (environment / "pyvenv.cfg").stat().st_mtime
    files = [environment, *environment.rglob("*")]
    used = _BLOCK_BYTES * sum(path.lstat().st_blocks for path in files)
    packages = {found.name for found in distributions(path=map(str, environment.glob("lib/python*/site-packages")))}
    return {"seconds": round(seconds, 1), "mib": used >> 20, "packages": len(packages), "cores": os.cpu_count()}


def describe(row: dict) -> str:
    """`104 packages, 2.3 GB, in 2.2 minutes`."""
    return f"{row['packages']} packages, {row['mib'] * 2**20 / 1e9:.1f} GB, in {row['seconds'] / 60:.1f} minutes"


def main(arguments: list[str]) -> None:
    found = measure(Path(sys.prefix))
    print(describe(found))
    if "--row" in arguments:
        from . import record

        print(f"row added to {record.append({'bench': 'setup', **found, **record.environment()})}")


if __name__ == "__main__":
    main(sys.argv[1:])
