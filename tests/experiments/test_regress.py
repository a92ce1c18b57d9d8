"""`regress`: two trees that are timed in turn."""

import json
import subprocess
from pathlib import Path

import pytest
import typer

from experiments import regress
from tests.experiments.invoke import invoke

ROOT = Path(regress.__file__).parents[1]


class _FakeTree:
    def __init__(self, name: str, times: list[float], asked: list[str]):
        self.name, self.times, self.asked = name, iter(times), asked

    def ask(self, **question) -> dict:
        self.asked.append(self.name)
        return {} if question else dict.fromkeys(("p50_us", "graph_p50_us", "host_us"), next(self.times))


def test_the_trees_are_timed_in_turn_and_medians_are_taken():
    asked = []
    trees = [_FakeTree("old", [1.0, 9.0, 2.0], asked), _FakeTree("new", [4.0, 3.0, 30.0], asked)]
    assert regress._time(trees, 3, shape="8b-b1") == [[2.0] * 3, [4.0] * 3]
    assert asked == ["old", "new"] * 4  # the first time to get ready


def test_a_commit_is_checked_out_for_as_long_as_it_is_needed():
    if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("no git checkout")
    with regress._tree_of("HEAD") as (folder, name):
        assert (folder / "experiments" / "bench.py").is_file() and len(name) == 40
    assert not folder.exists()


def test_a_folder_is_called_by_its_name(tmp_path):
    with regress._tree_of(str(tmp_path)) as found:
        assert found == (tmp_path, tmp_path.name)


def test_an_unknown_base_is_named(capsys):
    with pytest.raises(typer.Exit), regress._tree_of("no-such-commit"):
        pass
    assert "no-such-commit" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_tree_against_itself(tmp_path):
    flags = ("--base", ROOT, "--shape", "vision-49", "--variant", "fused", "--rounds", 2, "--out", tmp_path)
    result = invoke("regress", *flags)
    assert result.exit_code == 0, result.exception
    rows = [json.loads(line) for path in tmp_path.glob("*/regress.jsonl") for line in path.read_text().splitlines()]
    assert len(rows) == 2 and all(row["base_graph_p50_us"] > 0 and row["host_us"] > 0 for row in rows)
