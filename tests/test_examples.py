"""Each program in examples runs as it is, and prints what it promises."""

import re
from importlib.util import find_spec

import pytest

from ssd import get_variant
from ssd.registry import Variant, add_variant
from tests.programs import ROOT, run_python

EXAMPLES = ROOT / "examples"
RUN = """
import runpy, sys
for path in sys.argv[1:]:
    print("##", path)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each example prints, by its name; in one process, which imports torch once."""
    paths = [path for path in sorted(EXAMPLES.glob("*.py")) if find_spec("transformers") or "transformers" not in path.name]
    printed = run_python("-c", RUN, *paths).split("## ")[1:]
    return {path.name: text.partition("\n")[2] for path, text in zip(paths, printed, strict=True)}


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"train.py", "patch_transformers.py", "generate.py", "custom_variant.py"}
    assert {*re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())} == names


def test_a_model_learns_to_count(said):
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said["train.py"])]
    assert len(losses) == 4 and losses[0] > 3 and losses[-1] < 0.3


def test_a_patched_model_gives_the_same(said):
    pytest.importorskip("transformers")
    printed = said["patch_transformers.py"]
    assert "patched: {'transformers': 'auto'}" in printed
    assert float(printed.rpartition(": ")[2]) < 1e-3


def test_tokens_by_hand_are_those_of_generate(said):
    lines = (line.split(":", 1)[1] for line in said["generate.py"].splitlines())
    by_hand, by_generate, drawn, both, alone = (re.findall(r"\d+", tokens) for tokens in lines)
    assert by_hand == by_generate == both[:10] and both[10:] == alone
    assert len(by_hand) == 10 and 1 <= len(drawn) <= 10 and drawn != by_hand


def test_a_variant_of_ones_own_agrees(said):
    differences = re.findall(r"largest difference (\S+)", said["custom_variant.py"])
    assert len(differences) == 2 and all(float(one) < 1e-4 for one in differences)


@pytest.mark.parametrize("name", ("auto", "baseline"))
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=f"got '{name}', expected none of"):
        add_variant(Variant(name, supports=get_variant("torch").supports))
