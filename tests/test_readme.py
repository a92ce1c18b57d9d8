"""The README's example runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_python_example_runs():
    if not README.exists():
        pytest.skip("there is no README")
    example = re.search(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    if example is None:
        pytest.skip("the README has no Python example")
    environment = os.environ | {"PYTHONPATH": str(README.parent)}
    command = [sys.executable, "-c", example.group(1)]
    done = subprocess.run(command, cwd=README.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
