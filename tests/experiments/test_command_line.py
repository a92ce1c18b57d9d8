"""What the command line accepts, refuses and prints; without a GPU the bench itself too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments import interpret, names
from experiments.__main__ import app
from experiments.accuracy import Error
from ssd import Options, variant_names
from tests.experiments.rows import compared, ssd_row, write

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so the bench would measure")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_help(command):
    """What help says is no markup by accident."""
    result = run(command.replace("_", "-"), "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout


REFUSED = [
    ("bench --variant warp9", "--variant: got 'warp9', expected any of auto, baseline, fused, persistent, torch"),
    ("bench --shape 8b-b4,9b", "--shape: got '9b', expected named, workloads, sweep, models, or one of theirs: 8b-b1"),
    ("bench --out /proc/rows", "--out: got /proc/rows, expected a folder that can be written: /proc cannot"),
    ("bench --mode sideways", "--mode: got 'sideways', expected any of fwd, fwd_train, bwd, fwd_bwd"),
    ("bench --dtype fp8", "--dtype: got 'fp8', expected one of bf16, fp16, fp32"),
    ("bench --against nobody", "--against: got 'nobody', expected one of baseline"),
    ("bench --option exp2=off", "--option: got 'exp2=off', expected NAME=true, NAME=false or keep_bytes=NUMBER with a "
     "name of tf32"),
    ("bench --option keep_bytes=true", "--option: got 'keep_bytes=true', expected NAME=true, NAME=false or keep_bytes=NUMBER"),
    ("bench --chunk-size 100", "--chunk-size: got '100', expected any of 16, 32, 64, 128, 256, auto"),
    ("ablate --variant torch", "--variant: got 'torch', expected a variant with options"),
    ("block --part conv2d", "--part: got 'conv2d', expected any of conv1d"),
    ("block --scan 8b-b4", "--scan: got '8b-b4', expected any of mambavision-t-196"),
    ("characterize --workload gpt", "--workload: got 'gpt', expected one of mamba2"),
    ("compare 9999 8888", "OLD: got 9999, expected a folder, or a commit"),
    ("compare 9999 8888 --format pdf", "--format: got 'pdf', expected one of terminal, markdown"),
    ("fuzz --part model", "--part: got 'model', expected one of operator, block"),
    ("fuzz --config {}", "--config: got '{}', expected a JSON object with a part of operator, conv1d"),
    ("sanitize --variant fla", "--variant: got 'fla', expected any of persistent, fused, baseline, block, control"),
    ("sanitize --tool synccheck", "--tool: got 'synccheck', expected any of memcheck, racecheck"),
    ("regress --mode fwd_train", "--mode: got 'fwd_train', expected any of fwd, bwd, fwd_bwd"),
    ("scaling --seqlen 64,x", "--seqlen: got '64,x'"),
    ("sweep --workload rnn", "--workload: got 'rnn'"),
    ("table --format xml", "--format: got 'xml', expected one of markdown, csv, latex"),
    ("table --out nowhere", "--out: got nowhere, expected a folder that exists"),
    ("table --kernels", "--kernels: got --bench ssd, expected --bench counters"),
    ("train --workload rnn", "--workload: got 'rnn', expected one of mamba2, hybrid"),
    ("train --preset 9b", "--preset: got '9b', expected one of tiny, 130m"),
    ("train --workload mambavision --variant fused", "--variant: got 'fused', expected auto, torch, mamba_ssm with --mixer"),
    ("train --workload mambavision --seqlen 64", "--seqlen: got 64, expected none: images of mambavision are"),
    ("train --workload mambavision --tokenizer gpt2", "--tokenizer: got 'gpt2', expected none: mambavision reads no text"),
    ("train --workload mambavision --no-documents", "--documents: got False, expected none"),
    ("train --mixer mamba1", "--mixer: got 'mamba1', expected one of ssd"),
    ("train --optimizer sgd", "--optimizer: got 'sgd', expected one of adamw, lamb"),
    ("train --steps 0", "--steps: got 0, expected at least 1"),
    ("train --lr nan", "--lr: got nan, expected more than 0"),
    ("train --steps 3 --warmup 4", "--warmup: got 4, expected at most --steps, 3"),
    ("train --data books.txt", "--data: got 'books.txt', where nothing is, expected synthetic, a .txt file or a folder"),
    ("train --parallel pipeline", "--parallel: got 'pipeline', expected one of ddp, fsdp"),
    ("train --resume", "--resume: got --out"),
]
REFUSED_WITHOUT_GPU = [
    ("bench --counters", "--counters: needs a CUDA GPU, found none"),
    ("bench --variant auto", "--variant: got 'auto', which is torch's form without a GPU, expected any of base"),
    *((command, f"{command}: needs a CUDA GPU, found none")
      for command in ("block", "characterize", "regress", "sanitize", "scaling", "sweep", "tune")),
]


@pytest.mark.parametrize(("line", "said"), [*REFUSED, *(
    pytest.param(*case, marks=without_gpu) for case in REFUSED_WITHOUT_GPU)], ids=str)
def test_a_bad_option_is_refused_by_name_and_nothing_is_written(line, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*line.split(), *(["--out", tmp_path / "run"] if line.startswith("train") else []))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_table_of_rows(tmp_path):
    write(tmp_path, ssd_row(**compared()), ssd_row("mamba_ssm"), ssd_row("mamba_ssm", "2.7b-b4"))
    result = run("table", "--out", tmp_path, "--variant", "mamba_ssm", "--shape", "8b-b4")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3 and "baseline" not in result.stdout


@pytest.mark.parametrize(("name", "said"), [("persitent", "'persistent'"), ("pers", "'persistent'"), ("", ""), ("gpt", "")])
def test_a_near_name_is_suggested(name, said):
    assert names.suggest(name, ("baseline", "persistent")) == (f"; did you mean {said}?" if said else "")


@without_gpu
def test_bench_without_gpu(tmp_path):
    write(tmp_path, ssd_row("torch", "8b-b1", p50_us=4321.0), ssd_row("torch", "8b-b4", p50_us=9876.0))
    result = run("bench", "--variant", "torch", "--shape", "8b-b1,sweep-64", "--out", tmp_path)
    assert result.exit_code == 0, result.stdout
    for text in ("nothing is timed", "agrees", "8b-b1", "sweep-64", "4311"):
        assert text in result.stdout
    assert "9866" not in result.stdout, "a shape that was not asked for"
    assert len(list(tmp_path.glob("*/*"))) == 1, "a run without a GPU writes no rows"


@without_gpu
def test_options_of_the_bench_reach_the_variant(monkeypatch):
    seen = []

    def check(variant, dtype, options, modes):
        seen.append(options)
        return {"out": Error(0.0, 0.0)}

    monkeypatch.setattr(interpret, "check", check)
    given = ("--option", "exp2=false", "--option", "tf32=true")
    assert run("bench", "--variant", "torch", "--shape", "8b-b1", *given).exit_code == 0
    assert set(seen) == {Options(exp2=False, tf32=True)}


@without_gpu
def test_bench_without_gpu_fails_on_a_wrong_result(monkeypatch):
    monkeypatch.setattr(interpret, "check", lambda variant, dtype, options, modes: {"out": Error(float("nan"), 0.0)})
    result = run("bench", "--variant", "torch", "--shape", "8b-b1")
    assert result.exit_code == 1
    assert "DOES NOT AGREE" in result.stdout


@without_gpu
def test_bench_without_gpu_is_short_and_heeds_the_mode(monkeypatch):
    """All named shapes and modes in 40 lines of 100 columns; a forward alone has neither gradients nor their costs."""
    whole = run("bench", "--variant", "torch").stdout.splitlines()
    assert len(whole) <= 40 and max(map(len, whole)) <= 100 and any("bwd" in line for line in whole)
    seen = []
    check = interpret.check
    monkeypatch.setattr(interpret, "check", lambda *given: seen.append(check(*given).keys()) or check(*given))
    forward = run("bench", "--variant", "torch", "--mode", "fwd").stdout
    assert "bwd" not in forward and seen == [{"out"}] * 2


LIGHT = """
import sys
sys.argv = ["experiments", *{arguments}]
import runpy
try:
    runpy.run_module("experiments", run_name="__main__")
except SystemExit as end:
    loaded = {{"torch", "triton", "pandas", "numpy", "matplotlib"}} & sys.modules.keys()
    sys.exit(f"{{end.code}}: {{sorted(loaded)}}" if loaded or end.code != {status} else 0)
"""


@pytest.mark.parametrize("arguments, status", [
    (["--help"], 0), (["bench", "--help"], 0), (["train", "--help"], 0), (["bnech"], 2), (["bench", "--variant", "fusde"], 2),
    (["bench", "--shape", "9b"], 2), (["train", "--workload", "mamba3"], 2), (["fuzz", "--part", "all"], 2)])
def test_help_and_mistyped_names_wait_for_no_import(arguments, status):
    ran = subprocess.run([sys.executable, "-c", LIGHT.format(arguments=arguments, status=status)], cwd=ROOT,
                         capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_names_are_the_registrys():
    assert names.variant_names() == variant_names()


@pytest.mark.parametrize("command", ("bench", "ablate", "sweep", "fuzz", "train"))
def test_a_place_that_cannot_be_written_is_named(command, tmp_path):
    (tmp_path / "file").touch()
    result = run(command, "--out", tmp_path / "file" / "rows")
    assert result.exit_code == 2 and result.stderr.startswith(f"error: --out: got {tmp_path / 'file' / 'rows'}, expected")


@pytest.mark.parametrize("command", ("table", "readme"))
@pytest.mark.parametrize(
    "line, said", [("[1]", "expected a JSON object"), ('{"bench": "ssd"}', "with a time"), ("{", "not a JSON row")]
)
def test_a_broken_row_is_refused_by_file_and_line(tmp_path, command, line, said):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "ssd.jsonl").write_text(line + "\n")
    result = run(command, *(["--check"] if command == "readme" else []), "--out", tmp_path)
    assert result.exit_code == 2 and "ssd.jsonl:1" in result.stderr and said in result.stderr
