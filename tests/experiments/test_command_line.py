"""What the command line accepts, refuses and prints; without a GPU the bench itself too."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from experiments import interpret, known_names
from experiments.__main__ import app
from experiments.accuracy import Error
from experiments.workloads import get_workload, preset_names, workload_names
from ssd import Options, variant_names
from tests.experiments.invoke import invoke
from tests.experiments.rows import compare, ssd_row, write
from tests.experiments.small import without_gpu
from tests.programs import ROOT, run_python


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_help(command):
    """What help says is no markup by accident, and names no folder of this machine."""
    result = invoke(command.replace("_", "-"), "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout and str(ROOT) not in result.stdout


# commands, and below each how what is said begins
ANYWHERE, WITHOUT_GPU = ([tuple(map(str.strip, case)) for case in pairwise(part.splitlines()) if case[1].startswith(" ")]
                         for part in (Path(__file__).parent / "refused.txt").read_text().split("# where there is no GPU\n"))


@pytest.mark.parametrize(
    ("line", "said"), [*ANYWHERE, *(pytest.param(*case, marks=without_gpu) for case in WITHOUT_GPU)], ids=str)
def test_a_bad_option_is_refused_by_name_and_nothing_is_written(line, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*line.split(), *(["--out", tmp_path / "run"] if line.startswith("train") else []))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_make_refuses_variables_that_it_does_not_know():
    def make(*given):
        line = ["make", "--dry-run", "VENV=", "PYTHON=python3", *given]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)

    assert "bench --variant fused " in make("bench", "VARIANT=fused", "ARGS=--repeats 9").stdout
    refused = make("bench", "VARIANTS=fused", "SHAPE=8b-b4")
    assert refused.returncode == 2 and "*** VARIANTS: expected any of AGAINST ARGS" in refused.stderr
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    known = re.search("^KNOWN := (.*)", text, re.M)[1].split()
    of_its_own = {*re.findall("^ *([A-Z]+) :?= ?", text, re.M), "MAKEFILE_LIST"}
    assert {*re.findall(r"\$\((?:call with,)?([A-Z_]+)", text)} - of_its_own == set(known)


def test_several_processes_are_for_training(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun: got 2 processes of table, expected one" in invoke("table").stderr
    assert "--steps: got 0" in invoke("train", "--steps", "0").stderr


def test_table_of_rows(tmp_path):
    write(tmp_path, ssd_row(**compare()), ssd_row("mamba_ssm"), ssd_row("mamba_ssm", "2.7b-b4"))
    result = invoke("table", "--out", tmp_path, "--variant", "mamba_ssm", "--shape", "8b-b4")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3 and "baseline" not in result.stdout


@pytest.mark.parametrize("bench", ("ssd", "ablate", "block", "step", "counters"))
def test_each_bench_has_its_table(bench, tmp_path):
    """Of its own rows: here the last one that was committed."""
    (tmp_path / "h200").mkdir()
    last = (ROOT / "experiments/results/h200" / f"{bench}.jsonl").read_text().splitlines()[-1]
    (tmp_path / "h200" / f"{bench}.jsonl").write_text(last + "\n")
    assert invoke("table", "--bench", bench, "--out", tmp_path).stdout.count("\n") == 2 + 1


@pytest.mark.parametrize(("name", "said"), [("persitent", "'persistent'"), ("pers", "'persistent'"), ("", ""), ("gpt", "")])
def test_a_near_name_is_suggested(name, said):
    assert known_names.suggest(name, ("baseline", "persistent")) == (f"; did you mean {said}?" if said else "")


@without_gpu
def test_bench_without_gpu(tmp_path):
    write(tmp_path, ssd_row("torch", "8b-b1", p50_us=4321.0), ssd_row("torch", "8b-b4", p50_us=9876.0))
    result = invoke("bench", "--variant", "torch", "--shape", "8b-b1,sweep-64", "--out", tmp_path)
    assert result.exit_code == 0, result.stdout
    for text in ("nothing is timed", "agrees", "8b-b1", "sweep-64", "4311"):
        assert text in result.stdout
    assert "9866" not in result.stdout, "a shape that was not asked for"
    assert len(list(tmp_path.glob("*/*"))) == 1, "a run without a GPU writes no rows"


@without_gpu
def test_options_of_the_bench_reach_the_variant(monkeypatch):
    check = Mock(return_value={"out": Error(0.0, 0.0)})
    monkeypatch.setattr(interpret, "check", check)
    given = ("--option", "exp2=false", "--option", "tf32=true", "--also", "exp2=true,gluon=false")
    assert invoke("bench", "--variant", "torch", "--shape", "8b-b1", *given).exit_code == 0
    assert {call.args[2] for call in check.call_args_list} == {Options(exp2=False, tf32=True), Options(tf32=True, gluon=False)}
    assert "--also: got 'exp2'" in invoke("bench", "--variant", "torch", "--also", "tf32=true,exp2").output


@without_gpu
def test_bench_without_gpu_fails_on_a_wrong_result(monkeypatch):
    monkeypatch.setattr(interpret, "check", Mock(return_value={"out": Error(float("nan"), 0.0)}))
    result = invoke("bench", "--variant", "torch", "--shape", "8b-b1")
    assert result.exit_code == 1
    assert "DOES NOT AGREE" in result.stdout


@without_gpu
def test_bench_without_gpu_is_short_and_heeds_the_mode(monkeypatch):
    """All named shapes and modes in 40 lines of 100 columns; a forward alone has neither gradients nor their costs."""
    whole = invoke("bench", "--variant", "torch").stdout.splitlines()
    assert len(whole) <= 40 and max(map(len, whole)) <= 100 and any("bwd" in line for line in whole)
    seen = []
    check = interpret.check
    monkeypatch.setattr(interpret, "check", lambda *given: seen.append(check(*given).keys()) or check(*given))
    forward = invoke("bench", "--variant", "torch", "--mode", "fwd").stdout
    assert "bwd" not in forward and seen == [{"out"}] * 2


LIGHT = """
import sys
from typer.testing import CliRunner
from experiments.__main__ import app
for line in sys.argv[1:]:
    status = CliRunner().invoke(app, line.split()).exit_code
    loaded = {"torch", "triton", "pandas", "numpy", "matplotlib"} & sys.modules.keys()
    assert status == (0 if "--help" in line else 2) and not loaded, f"{line}: {status}, {sorted(loaded)}"
"""


def test_help_and_mistyped_names_wait_for_no_import():
    lines = ("--help", "bench --help", "train --help", "bnech", "bench --variant fusde", "bench --shape 9b", "fuzz --part all",
             "decode --preset 9b", "train --workload mamba3", "train --preset 9b", "train --workload hybrid --preset 130m",
             "train --optimizer sgd", "train --dtype fp8")
    run_python("-c", LIGHT, *lines)


def test_names_are_the_registrys(monkeypatch):
    assert known_names.variant_names() == variant_names()
    for name in workload_names():
        presets = tuple(get_workload(name).presets)
        monkeypatch.delitem(sys.modules, f"experiments.workloads.{name}")
        assert preset_names(name) == presets, "as they are in the source"


@pytest.mark.parametrize("command", ("bench", "ablate", "sweep", "fuzz", "train"))
def test_a_place_that_cannot_be_written_is_named(command, tmp_path):
    (tmp_path / "file").touch()
    result = invoke(command, "--out", tmp_path / "file" / "rows")
    assert result.exit_code == 2 and result.stderr.startswith(f"error: --out: got {tmp_path / 'file' / 'rows'}, expected")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for odd in (tmp_path / "link", tmp_path / ("x" * 300)):
        result = invoke(command, "--out", odd)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: --out: got {odd}, expected")


@pytest.mark.parametrize("command", ("table", "readme"))
@pytest.mark.parametrize("line, said", [
    ("[1]", "expected a JSON object"), ('{"bench": "ssd"}', "a bench and a time"),
    ('{"time": "2026"}', "a bench and a time"), ("{", "not a JSON row"), ("\udcff", "not a JSON row"),
    ('{"bench": "ssd", "time": "2026", "p50_us": NaN}', "NaN is no number")])
def test_a_broken_row_is_refused_by_file_and_line(tmp_path, command, line, said):
    write(tmp_path, ssd_row())
    with (tmp_path / "h200" / "ssd.jsonl").open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    result = invoke(command, *(["--check"] if command == "readme" else []), "--out", tmp_path)
    assert result.exit_code == 2 and "ssd.jsonl:2" in result.stderr and said in result.stderr


def test_documents_are_not_written_from_no_rows(tmp_path):
    result = invoke("readme", "--out", tmp_path)
    assert result.exit_code == 2 and "which has no row of make bench" in result.stderr
