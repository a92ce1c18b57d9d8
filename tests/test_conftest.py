"""How the tests are run: groups for xdist's workers, parts of the suite, failures told at once, and the row on a GPU."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments import record
from tests import conftest
from tests.experiments.rows import ENVIRONMENT
from tests.gpus import rotate
from tests.inputs import OURS

pytest_plugins = "pytester"
needs_xdist = pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")

SUITE = f"""
import os
import pytest

@pytest.mark.parametrize("name", {OURS!r})
@pytest.mark.parametrize("number", range(6), ids="size[{{}}]".format)
def test_it(name, number):
    with open(f"ran-{{number}}-{{name}}", "x") as file:
        file.write(os.environ.get("PYTEST_XDIST_WORKER", "alone"))
    if name == "fused" and number == 5:
        pytest.skip("needs a moon")
"""
FAILING = """
def test_fails():
    assert 1 == 2, "said at once"

def test_passes():
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs tests given as source under this conftest, as if there were a GPU."""

    def run(source, *arguments, way=pytester.runpytest_inprocess):
        pytester.makepyfile(test_it=source)
        return way(*arguments)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = "import torch\ntorch.cuda.is_available = lambda: True\n"  # in xdist's workers too
    pytester.makeconftest(gpu + Path(conftest.__file__).read_text())
    return run


def ran(path: Path) -> dict[int, list[str]]:
    """{number: the workers that its variants ran in} of SUITE."""
    found = {}
    for file in sorted(path.glob("ran-*")):
        found.setdefault(int(file.name.split("-")[1]), []).append(file.read_text())
    return found


def test_parts_are_the_whole_and_keep_groups_together(run, pytester):
    seen = 0
    for number in (1, 2, 3):
        run(SUITE, "test_it.py", f"--shard={number}/3")
        assert all(len(workers) == len(OURS) for workers in ran(pytester.path).values())
        assert len(ran(pytester.path)) < 6, "one part has all"
        seen += len(ran(pytester.path))
        for file in pytester.path.glob("ran-*"):
            file.rename(file.with_name(file.name.replace("ran", "done")))
    assert seen == 6


SLOW = SUITE + "\n@pytest.mark.slow\ndef test_slow():\n    pass\n"


def test_slow_tests_begin_first(run):
    """Also where others are in larger groups."""
    ended = [line for line in run(SLOW, "test_it.py", "-v").outlines if re.search("PASSED|SKIPPED", line)]
    assert "::test_slow" in ended[0]


@needs_xdist
def test_a_group_runs_in_one_worker_and_slow_tests_begin_first(run, pytester):
    result = run(SLOW, "test_it.py", "-v", "--numprocesses=2")
    result.assert_outcomes(passed=18, skipped=1)
    workers = ran(pytester.path)
    assert all(len(set(of_group)) == 1 for of_group in workers.values())
    assert {worker for of_group in workers.values() for worker in of_group} == {"gw0", "gw1"}
    ended = [line for line in result.outlines if re.search("PASSED|SKIPPED", line)]
    (worker,) = (line.partition("]")[0] for line in ended if "::test_slow" in line)
    assert "::test_slow" in next(line for line in ended if line.startswith(worker))


def test_a_failure_is_told_at_once_also_by_a_run_that_dies(run, pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    dying = FAILING.replace("pass\n", "__import__('os')._exit(9)\n")
    result = run(dying, "test_it.py", way=pytester.runpytest_subprocess)
    assert result.ret == 9 and "FAILED test_it.py::test_fails" in result.outlines
    assert "  E       AssertionError: said at once" in result.outlines


WITHOUT_GPU = "import torch\ntorch.cuda.is_available = lambda: False\n"


@pytest.mark.parametrize(("arguments", "expected", "before"), [
    ((), {"passed": 17, "skipped": 1, "reasons": {"needs a moon": 1}}, ""),
    (("-k", "baseline"), None, ""),
    (("--row", "test_it.py", "-k", "baseline or size[1]"), {"only": "test_it.py -k 'baseline or size[1]'", "passed": 8}, ""),
    (("--row", "--collect-only", "test_it.py"), None, ""),
    (("--row", "-x"), None, ""),
    (("--deselect", "test_it.py::test_it[size[0]-baseline]"), None, ""),
    (("--shard=1/1",), {"shard": "1/1", "passed": 17}, ""),
    ((), None, WITHOUT_GPU),
    (("--row",), {"bench": "tests", "passed": 17}, WITHOUT_GPU),
])
def test_only_a_whole_run_or_one_that_is_asked_leaves_a_row(run, arguments, expected, before, tmp_path, monkeypatch):
    """A whole run only where there is a GPU."""
    monkeypatch.setattr(record, "append", partial(record.append, out=tmp_path))
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    run(before + SUITE, *arguments)
    rows = record.read(tmp_path)
    assert len(rows) == (expected is not None)
    for row in rows:
        assert row | expected == row and ("only" in row) == ("only" in expected)


def test_workers_share_out_the_gpus():
    """Each has one of its own in front, and sees all of them."""
    assert [rotate(["4", "5", "7"], worker) for worker in ("gw0", "gw1", "gw5")] == [
        ["4", "5", "7"], ["5", "7", "4"], ["7", "4", "5"]]
    assert rotate(["0"], "gw11") == ["0"]
