"""How the tests are run: groups for xdist's workers, parts of the suite, failures told at once, and the row on a GPU."""

from argparse import ArgumentTypeError
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments import record
from tests import conftest
from tests.experiments.rows import ENVIRONMENT
from tests.gpus import rotated
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
"""
FAILING = """
import pytest

@pytest.mark.parametrize("name", ("baseline",))
def test_fails(name):
    assert 1 == 2, "said at once"

def test_passes():
    pass
"""
SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="needs a moon")
@pytest.mark.parametrize("number", range(2))
def test_at_night(number):
    pass

def test_within():
    pytest.skip("no reason")

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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("test_b[baseline]", "test_b[fused]", True),
        ("test_b[plain-fused-b2-l1]", "test_b[plain-persistent-b2-l1]", True),
        ("test_b[plain-fused-b2-l1]", "test_b[plain-persistent-b2-l2]", False),
        ("test_b[fused]", "test_c[persistent]", False),
        ("test_b[fused_step]", "test_b[persistent_step]", False),
        ("test_fused", "test_persistent", False),
    ],
)
def test_group_is_all_but_the_variant(one, other, same):
    one, other = (conftest.group(f"tests/fused/test_a.py::{name}") for name in (one, other))
    assert (one == other) is same and one.startswith("tests/fused/test_a.py::test_")


@pytest.mark.parametrize("count", (1, 2, 3, 4))
def test_parts_are_the_whole(count):
    groups = [f"{shape}-{dtype}" for shape, dtype in product(range(16), ("bf16", "fp16", "fp32"))]
    parts = [conftest.dealt(groups, number, count) for number in range(1, count + 1)]
    assert sorted(group for part in parts for group in part) == sorted(groups)
    for dtype in ("bf16", "fp16", "fp32"):
        shares = [sum(group.endswith(dtype) for group in part) for part in parts]
        assert max(shares) - min(shares) <= 1, "a part has all the slow ones"


def test_shard_of():
    assert conftest.shard_of("2/3") == (2, 3)


@pytest.mark.parametrize("text", ("0/3", "4/3", "2", "2/", "-1/3", "2/3/4", "1/0", "a/b"))
def test_bad_shard(text):
    with pytest.raises(ArgumentTypeError, match=f"got '{text}', expected K/N, the K-th of N parts, with 1 <= K <= N"):
        conftest.shard_of(text)


def test_bad_shard_names_its_option(run):
    result = run(SUITE, "--shard=4/3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*error: argument --shard: got '4/3', expected K/N, *")


def test_shards_keep_groups_whole(run, pytester):
    seen = []
    for number in (1, 2, 3):
        run(SUITE, "test_it.py", f"--shard={number}/3").assert_outcomes(passed=2 * len(OURS), deselected=4 * len(OURS))
        assert all(len(workers) == len(OURS) for workers in ran(pytester.path).values())
        seen.append(len(ran(pytester.path)))
    assert seen == [2, 4, 6], "a test of two shards would have failed"


def test_without_xdist(run):
    run(SUITE, "test_it.py", "-p", "no:xdist").assert_outcomes(passed=6 * len(OURS))


@needs_xdist
def test_a_group_runs_in_one_worker(run, pytester):
    run(SUITE, "test_it.py", "--numprocesses=2").assert_outcomes(passed=6 * len(OURS))
    workers = ran(pytester.path)
    assert all(len(set(of_group)) == 1 for of_group in workers.values())
    assert {worker for of_group in workers.values() for worker in of_group} == {"gw0", "gw1"}


@pytest.mark.parametrize("arguments", [(), pytest.param(("--numprocesses=1",), marks=needs_xdist)])
def test_a_failure_is_told_at_once_and_the_closing_line_comes_last(run, arguments):
    lines = run(FAILING, "test_it.py", *arguments).outlines
    told = lines.index("FAILED test_it.py::test_fails[baseline]")
    assert "  E       AssertionError: said at once" in lines[told:lines.index(next(x for x in lines if "= FAILURES =" in x))]
    assert sum("said at once" in line and line.startswith("  E") for line in lines) == 1
    assert "1 failed, 1 passed" in [line for line in lines if line][-1]


def test_a_run_that_dies_has_told_its_failures(run, pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    dying = FAILING.replace("pass\n", "__import__('os')._exit(9)\n")
    result = run(dying, "test_it.py", way=pytester.runpytest_subprocess)
    assert result.ret == 9 and "FAILED test_it.py::test_fails[baseline]" in result.outlines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"passed": 18}),
        (("--shard=2/3",), {"shard": "2/3", "passed": 6}),
        (("test_it.py",), None),
        (("-k", "baseline"), None),
        (("--row",), {"passed": 18}),
        (("--row", "test_it.py", "-k", "baseline or size[1]"), {"only": "test_it.py -k 'baseline or size[1]'", "passed": 8}),
        (("--row", "--collect-only", "test_it.py"), None),
        (("--row", "-x"), None),
        (("--deselect", "test_it.py::test_it[size[0]-baseline]"), None),
        (("--row", "--deselect", "test_it.py::test_it[size[0]-fused]"),
         {"only": "--deselect 'test_it.py::test_it[size[0]-fused]'", "passed": 17}),
    ],
)
def test_row_of_a_run(run, arguments, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "append", partial(record.append, out=tmp_path))
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    run(SUITE, *arguments)
    rows = record.read(tmp_path)
    assert len(rows) == (expected is not None)
    for row in rows:
        assert {key: row[key] for key in ("only", "shard", "passed") if key in row} == expected


@pytest.mark.parametrize("arguments", [(), pytest.param(("--numprocesses=1",), marks=needs_xdist)])
def test_row_says_why_tests_were_skipped(run, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "append", partial(record.append, out=tmp_path))
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    run(SKIPPING, *arguments)
    (row,) = record.read(tmp_path)
    assert (row["passed"], row["skipped"]) == (1, 3) and row["reasons"] == {"needs a moon": 2, "no reason": 1}


def test_a_run_that_is_broken_off_leaves_no_row(run, pytester, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "append", partial(record.append, out=tmp_path))
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    run("def test_passes(): pass\ndef test_stops(): raise KeyboardInterrupt\n",
        way=partial(pytester.runpytest_inprocess, no_reraise_ctrlc=True))
    assert not record.read(tmp_path)


def test_workers_share_out_the_gpus():
    """Each has one of its own in front, and sees all of them."""
    assert [rotated(["4", "5", "7"], worker) for worker in ("gw0", "gw1", "gw5")] == [
        ["4", "5", "7"], ["5", "7", "4"], ["7", "4", "5"]]
    assert rotated(["0"], "gw11") == ["0"]
