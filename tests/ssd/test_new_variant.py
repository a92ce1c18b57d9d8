"""A new variant is a folder of its own and one line of the table of variants; nothing else of `ssd` changes."""

import os
import shutil

from tests.programs import ROOT, run_python

LINE = '    "toy": Entry("toy.variant", options="toy/options.py"),\n'
OPTIONS = 'OPTIONS = {"doubled": "Return twice the output. Off, once."}\n'
VARIANT = """
from ssd.registry import Variant, get_variant

TORCH = get_variant("torch")

def forward(inputs, options, save):
    out, *others = TORCH.forward(inputs, options, save)
    return (2 * out if options.doubled else out), *others

VARIANT = Variant("toy", supports=lambda inputs: None, forward=forward, backward=TORCH.backward, options=("doubled",))
"""
PROGRAM = """
import torch
from ssd import Options, get_variant, ssd_chunk_scan

torch.manual_seed(0)
x, dt, A = torch.randn(1, 40, 2, 8), torch.rand(1, 40, 2), -torch.rand(2)
B, C = torch.randn(2, 1, 40, 1, 8)
plain, once, twice = (ssd_chunk_scan(x, dt, A, B, C, 16, variant=name, options=options) for name, options in (
    ("torch", None), ("toy", Options(doubled=False)), ("toy", None)))
assert torch.equal(plain, once) and torch.equal(2 * plain, twice)
assert get_variant("toy").options == ("doubled",) and "doubled: Return twice" in Options.__doc__
"""


def test_a_folder_and_a_line(tmp_path):
    for package in ("ssd", "fused", "persistent"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "ssd" / "variants.py"
    before, brace, after = table.read_text().rpartition("}")
    table.write_text(f"{before}{LINE}{brace}{after}")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "variant.py").write_text(VARIANT)
    (tmp_path / "toy" / "options.py").write_text(OPTIONS)
    run_python("-c", PROGRAM, folder=tmp_path, environment=os.environ | {"PYTHONPATH": str(tmp_path)})
