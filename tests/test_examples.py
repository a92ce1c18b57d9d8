"""Each program in examples runs as it is, and prints what it promises."""

import re

import pytest

from ssd import get_variant
from ssd.registry import Variant, add_variant
from tests.programs import ROOT, run_python

EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    return run_python(EXAMPLES / name)


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"train.py", "patch_transformers.py", "generate.py", "custom_variant.py"}
    assert {*re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())} == names


def test_a_model_learns_to_count():
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run("train.py"))]
    assert len(losses) == 4 and losses[0] > 3 and losses[-1] < 0.3


def test_a_patched_model_gives_the_same():
    pytest.importorskip("transformers")
    said = run("patch_transformers.py")
    assert "patched: {'transformers': 'auto'}" in said
    assert float(said.rpartition(": ")[2]) < 1e-3


def test_tokens_by_hand_are_those_of_generate():
    said = dict(line.split(":", 1) for line in run("generate.py").splitlines())
    by_hand, by_generate, drawn, both, alone = (re.findall(r"\d+", tokens) for tokens in said.values())
    assert by_hand == by_generate == both[:10] and both[10:] == alone
    assert len(by_hand) == 10 and 1 <= len(drawn) <= 10 and drawn != by_hand


def test_a_variant_of_ones_own_agrees():
    differences = re.findall(r"largest difference (\S+)", run("custom_variant.py"))
    assert len(differences) == 2 and all(float(one) < 1e-4 for one in differences)


@pytest.mark.parametrize("name", ("auto", "baseline"))
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=f"got '{name}', expected none of"):
        add_variant(Variant(name, supports=get_variant("torch").supports))
