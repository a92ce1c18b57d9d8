"""A new variant is a folder of its own and one line of the table of variants, or a user's own; nothing else changes."""

import os
import shutil
from dataclasses import replace

import pytest
from triton import knobs

from ssd import registry, ssd_chunk_scan
from tests.inputs import GPU, Case, Shape, arguments, random_inputs
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


@pytest.fixture
def stranger(monkeypatch):
    """The name of a user's variant that takes no initial states, and would ignore them."""
    ours = registry.get_variant("torch")

    def forward(i, options, save):
        return ours.forward(replace(i, initial_states=None), options, save)

    def supports(i):
        return None if i.initial_states is None else "it takes no initial states"

    monkeypatch.setattr(registry, "_ADDED", {})
    registry.add_variant(registry.Variant("stranger", supports=supports, forward=forward, backward=ours.backward))
    return "stranger"


def scan_documents(variant: str) -> None:
    inputs = random_inputs(case=Case(documents="states"), shape=Shape(), device="cuda" if GPU else "cpu")
    ssd_chunk_scan(**arguments(inputs), return_final_states=True, variant=variant)


def test_rows_of_documents_go_to_no_variant_that_refuses_them(stranger):
    """They come with the state that the row before left."""
    with pytest.raises(ValueError, match="'stranger' cannot run these inputs: it takes no initial states"):
        scan_documents(stranger)


@pytest.mark.skipif(GPU, reason="the kernels that cut documents run there")
def test_documents_are_cut_where_kernels_run(stranger, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"'stranger' gets documents with states in rows, and .* need a CUDA device"):
        scan_documents(stranger)
