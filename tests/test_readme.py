"""The README's examples run as they are printed."""

import re

import pytest

from tests.programs import ROOT, run_python

README = ROOT / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


INPUTS = """
import torch
x, (B, C) = torch.randn(1, 64, 2, 16), torch.randn(2, 1, 64, 1, 16)
dt, A = torch.rand(1, 64, 2), -torch.rand(2)
"""


def test_there_are_examples():
    assert len(EXAMPLES) == 2


def test_the_first_screen_decides():
    """The figure, the table of six rows, installation, use, the patch, the GPU, the variant and the two commands."""
    first = README.read_text().partition("\n## ")[0]
    parts = ("make bench VARIANT=persistent", "make test", "docs/speedups.svg", "pip install", "ssd_chunk_scan(", "patch_",
             "Hopper", '"auto"', '"persistent"')
    assert [part for part in parts if part not in first] == []
    lines = first.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + 6 and len(lines) <= 42


def test_python_examples_run():
    """Each with names of its own."""
    pytest.importorskip("transformers")
    programs = [("" if "import torch\n" in example else INPUTS) + example for example in EXAMPLES]
    run_python("-c", "\n".join(f"exec({program!r}, {{}})" for program in programs))
