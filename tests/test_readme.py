"""The README's examples run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def test_there_are_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_python_example_runs(number):
    if "patch_transformers" in EXAMPLES[number]:
        pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": str(README.parent)}
    command = [sys.executable, "-c", EXAMPLES[number]]
    done = subprocess.run(command, cwd=README.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
