"""The ablation on a CPU: which sets of options are measured, what a row says, and what is shown."""

from unittest.mock import Mock

from experiments import ablate, interpret, record
from experiments.accuracy import Error
from experiments.shapes import SMALL
from ssd import Options
from ssd.registry import get_variant
from tests.experiments.invoke import invoke
from tests.experiments.rows import ssd_row
from tests.experiments.small import without_gpu
from tests.experiments.test_bench import clock  # noqa: F401  a fixture

NAMES = ("exp2", "gluon", "tf32")


def on(*names):
    return {name: getattr(Options(), name) for name in vars(Options())} | {name: name in names for name in NAMES}


def test_steps():
    steps = [(step.step, step.changed, vars(step.options)) for step in ablate.list_steps(NAMES)]
    assert steps == [
        ("all", None, on("exp2", "gluon", "tf32")),
        ("without", "exp2", on("tf32")),
        ("without", "gluon", on("exp2", "tf32")),
        ("without", "tf32", on("exp2")),
        ("none", None, on()),
        ("added", "exp2", on("exp2")),
        ("added", "gluon", on("exp2", "gluon")),
        ("added", "tf32", on("exp2", "gluon", "tf32")),
    ]


def test_rows(tmp_path, clock, monkeypatch):  # noqa: F811
    """Six steps of a variant with two options, in three different sets, each measured once."""
    measure = Mock(wraps=ablate.measure)
    monkeypatch.setattr(ablate, "measure", measure)
    monkeypatch.setattr(
        ablate, "_list_every_step", lambda variants: ((v, s) for v in variants for s in ablate.list_steps(NAMES[:2])))
    rows = ablate.run(("torch",), (SMALL,), ("fwd",), "fp32", 32, tmp_path, ablate.Console(quiet=True))
    measured = [candidate for call in measure.call_args_list for candidate in call.args[2]]
    assert len(measured) == len(set(measured)) == 3
    assert [(row["step"], row["changed"]) for row in rows] == [
        ("all", None), ("without", "exp2"), ("without", "gluon"), ("none", None), ("added", "exp2"), ("added", "gluon")]
    assert all(row["bench"] == "ablate" and row["p50_us"] == 2000 and row["err_rms"] < 1e-5 for row in rows)
    assert [row["options"]["exp2"] for row in rows] == [True, False, True, False, True, True]
    assert record.read(tmp_path) == rows


def test_plain_kernels_are_compared_with_plain_kernels():
    """Off goes exp2, and with it the Gluon kernels: what exp2 is worth is not what those are."""
    def row(step, changed, us):
        return ssd_row("fused", bench="ablate", step=step, changed=changed, p50_us=us, graph_p50_us=None)

    rows = ablate.add_relative([row("all", None, 100.0), row("without", "gluon", 200.0), row("without", "exp2", 300.0)])
    assert [r["relative"] for r in rows] == [1.0, 2.0, 1.5]


@without_gpu
def test_without_a_gpu_nothing_is_timed_and_a_wrong_result_fails(monkeypatch, tmp_path):
    """The interpreter's results are judged in tests/ssd."""
    every = ablate.list_steps
    monkeypatch.setattr(ablate, "list_steps", lambda names: every(names)[:2])
    check = Mock(return_value={"out": Error(0.0, 0.0)})
    monkeypatch.setattr(interpret, "check", check)
    command = ["ablate", "--variant", "baseline", "--out", tmp_path]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    for text in ("nothing is timed", "1 of 2: baseline: all", "without", get_variant("baseline").options[0]):
        assert text in result.stdout
    assert not list(tmp_path.iterdir()), "a run without a GPU writes no rows"
    assert {call.args[-1] for call in check.call_args_list} == {("fwd",)}
    invoke(*command, "--mode", "bwd")
    assert check.call_args.args[-1] == ("bwd",)
    check.return_value = {"out": Error(float("nan"), 0.0)}
    assert invoke(*command).exit_code == 1
