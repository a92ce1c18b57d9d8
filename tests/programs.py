"""Python programs that tests start, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """What the program prints: without Triton's interpreter and with this tree's packages, if no environment is given."""
    usual = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, arguments)], env=usual if environment is None else environment, cwd=folder,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
