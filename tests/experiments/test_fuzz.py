"""The fuzz: what it draws, that it raises no false alarms, that planted faults are found, named and made small."""

import json
import math
import os
from dataclasses import fields, replace
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from experiments import record
from experiments.fuzz import campaign, judge, operator, pool, trial
from experiments.fuzz.block import BLOCK_PARTS
from experiments.fuzz.block.conv1d import Config as ConvConfig
from experiments.fuzz.block.gated_norm import Config as NormConfig
from experiments.fuzz.block.selective_scan import Config as ScanConfig
from experiments.fuzz.block.updates import StateConfig
from experiments.fuzz.layouts import LAYOUTS, lay_out, pack
from experiments.fuzz.operator import DIFFERENTIABLE, Config
from experiments.fuzz.parts import DRAWS, from_json, part_of, to_json
from experiments.fuzz.pool import Pool
from experiments.fuzz.shrink import shrink
from ssd import Options, torch_variant
from ssd.block import conv1d, gated_norm, selective_scan, state_update
from ssd.registry import get_variant
from tests.experiments.faults import FAULTS, run_worker
from tests.experiments.forked import Process
from tests.experiments.invoke import invoke

EVERYTHING = Config(
    seed=3, batch=2, seqlen=150, ngroups=2, heads_per_group=2, headdim=12, dstate=9, chunk_size=32, D="h", z=True, dt_bias=True,
    dt_softplus=True, initial_states=True, final_states=True, documents="seq_idx", ndocs=3, wanted=DIFFERENTIABLE,
    ways=("out", "final_states"), calls=5)
pytestmark = pytest.mark.usefixtures("one_thread")
IN_PROCESSES = ("ends its process", "hangs")


@pytest.fixture
def fork_workers(monkeypatch):
    """Workers are forked, not spawned."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(pool, "get_context", lambda way: SimpleNamespace(Pipe=Pipe, Process=Process))


def draw(seed: int, families: int, device: str = "cuda", part: str = "operator", variants=("fused", "persistent")) -> list:
    return [c for index in range(families) for c in DRAWS[part](seed, index, list(variants), device, 6)]


def test_a_seed_draws_the_same():
    assert draw(1, 5) == draw(1, 5)
    assert draw(1, 5) != draw(2, 5)


def test_the_same_configuration_has_the_same_inputs():
    first, second = (operator.problem(EVERYTHING, 1, "cpu").tensors for _ in range(2))
    other = operator.problem(EVERYTHING, 0, "cpu").tensors
    for name, t in first.items():
        assert t is None or (torch.equal(t, second[name]) and t.stride() == second[name].stride())
    assert not torch.equal(first["x"], other["x"]) and not torch.equal(first["seq_idx"], other["seq_idx"])


def test_a_compiled_call_makes_no_options(monkeypatch):
    """torch 2.11 cannot compile a function that makes them."""
    problem = operator.problem(replace(EVERYTHING, variant="torch", options={"exp2": False}), 0, "cpu")
    monkeypatch.setattr(operator, "Options", None)
    assert problem.run(problem.tensors)["out"].isfinite().all()


def test_no_step_is_at_a_limit():
    """Where rounding would decide whether dt has a gradient."""
    c = replace(EVERYTHING, dt_bias=False, dt_softplus=False, dt_limit=(0.02, 0.06))
    dt = torch.tensor([0.02, 0.02 - 1e-8, 0.06 + 1e-7, 0.04])
    moved = operator._keep_off_limits(c, dt, None)
    assert (moved[:3] / dt[:3] - 1).abs().min() > 1e-3 and moved[3] == dt[3]


def test_documents_count_in_the_exponent():
    """Of 16-bit calls, by those that begin in the same 64 tokens."""
    c = replace(EVERYTHING, batch=1, seqlen=130, cuts="tokens", decay="none")
    assert [operator.problem(replace(c, dtype=dtype), 0, "cpu").exponent for dtype in ("bf16", "fp32")] == [64 * 128, 0]


def test_draws_reach_everything():
    """Sizes, options, ways of calling and layouts, within a few minutes' worth of draws."""
    configs = draw(0, 400, variants=("auto", "baseline", "fused", "persistent"))
    assert {c.variant for c in configs} == {"auto", "baseline", "fused", "persistent"}
    assert {c.mode for c in configs} == {"plain", "capture", "streams", "no_grad", "inference", "checkpoint", "compile"}
    assert {name for c in configs for name in c.options} >= {"tf32", *get_variant("fused").options,
                                                             *get_variant("persistent").options}
    assert {f.name for f in fields(Options)} == {name for c in configs for name in c.options} | {"tf32", "keep_bytes"}
    assert {layout for c in configs for layout in c.layouts.values()} == {*LAYOUTS[1:], "packed", "scalar"}
    assert {c.documents for c in configs} == {None, "seq_idx", "cu_seqlens", "varlen", "both"}
    assert {c.dtype for c in configs} == {"bf16", "fp16", "fp32"}
    for name in ("headdim", "dstate"):
        sizes = {getattr(c, name) for c in configs}
        assert min(sizes) == 1 and max(sizes) == 256 and len(sizes) > 60
    assert max(c.seqlen for c in configs if c.seqlen < 200_000) > 4500
    assert sum(c.seqlen > 200_000 for c in configs) == 1
    hopper = [c for c in configs if c.headdim == 64 and c.dstate in (64, 128) and not c.z and c.heads_per_group % 2 == 0]
    assert 0.15 < len(hopper) / len(configs) < 0.4
    assert all(c.batch == 1 for c in configs if c.documents in ("cu_seqlens", "varlen", "both"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_layouts_keep_values(layout, shape):
    t = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    assert torch.equal(lay_out(t, layout), t)


def test_packed_tensors_are_slices_of_one():
    made = pack({"x": torch.randn(2, 3, 4, 5), "dt": torch.randn(2, 3, 4)})
    assert made["x"].shape == (2, 3, 4, 5) and made["dt"].shape == (2, 3, 4)
    assert made["x"].stride(1) == made["dt"].stride(1) == 24
    assert made["x"].untyped_storage().data_ptr() == made["dt"].untyped_storage().data_ptr()


def ratios(configs: list) -> list[float]:
    """Of errors to their bounds, where none fails; torch.compile takes too long here."""
    outcomes = [(to_json(c), trial.run(c, "cpu")) for c in configs if c.mode != "compile"]
    assert not [(line, outcome.why) for line, outcome in outcomes if outcome.status != "passed"]
    return [outcome.ratio for _, outcome in outcomes]


def small(configs: list) -> list:
    return [replace(c, seqlen=min(c.seqlen, 100), calls=2) for c in configs if c.cuts != "tokens" or c.documents == "seq_idx"]


def test_no_false_alarms():
    """Of what is right in every dtype, with any options."""
    ratios(small(draw(1, 3, "cpu", variants=("torch",))))


@pytest.mark.parametrize("index", range(len(BLOCK_PARTS)), ids=BLOCK_PARTS)
def test_no_false_alarms_of_the_block(index, in_torch):
    configs = DRAWS["block"](5, index, ["torch"], "cpu", 5)
    assert all(from_json(to_json(c)) == c for c in configs) and DRAWS["block"](5, index, ["torch"], "cpu", 5) == configs
    assert {part_of(c) for c in configs} == {list(BLOCK_PARTS)[index]}
    first, second = (BLOCK_PARTS[part_of(configs[0])].problem(configs[0], 0, "cpu").tensors for _ in range(2))
    assert all(t is None or torch.equal(t, second[name]) for name, t in first.items())
    ratios([replace(c, calls=3) for c in configs])


BLOCK_FAULTS = {
    "out": (conv1d, lambda results: (results[0] * 1.02, results[1]), ConvConfig(batch=2, dim=70, seqlen=40)),
    "dx": (gated_norm, lambda out: out + 0.02 * (out - out.detach()),
           NormConfig(seqlen=30, group_size=20, z=True, wanted=("x",))),
    "last_state": (selective_scan, lambda results: (results[0], results[1].flip(1)),
                   ScanConfig(seqlen=12, channels=4, dstate=3, last_state=True)),
    "state": (state_update, None, StateConfig(batch=3, dim=20, dstate=8))}


@pytest.mark.parametrize("result", BLOCK_FAULTS)
def test_faults_of_the_block_are_found(result, in_torch, monkeypatch):
    """Planted in what is called, not in the mirror, which has the function by another name."""
    module, change, config = BLOCK_FAULTS[result]
    config, right = replace(config, calls=5), module.compute_in_torch
    assert trial.run(config, "cpu").status == "passed"

    def wrong(*args):
        if change is not None:
            return change(right(*args))
        state, *others = args
        return right(state.clone(), *others)  # the state does not move on

    monkeypatch.setattr(module, "compute_in_torch", wrong)
    outcome = trial.run(config, "cpu")
    assert outcome.failed and outcome.why.startswith(result)


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_what_is_right_passes(dtype):
    assert trial.run(replace(EVERYTHING, dtype=dtype), "cpu").status == "passed"


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in IN_PROCESSES])
def test_faults_are_found(fault, dtype, monkeypatch):
    result = next((word for word in fault.split() if word.startswith(("d", "out", "final"))), "")
    config = replace(EVERYTHING, dtype=dtype, z=result != "out")  # dz is found from out, and would be named first
    monkeypatch.setattr(torch_variant, "VARIANT", FAULTS[fault])
    outcome = trial.run(config, "cpu")
    assert outcome.failed
    assert outcome.why.splitlines()[0].startswith(result)


def find(fault: str, lines: list[str], timeout: float = 60) -> dict[str, trial.Outcome]:
    with Pool(1, timeout, partial(run_worker, fault)) as workers:
        return dict(workers.run([line] for line in lines))


@pytest.mark.parametrize("wanted", [DIFFERENTIABLE, ("z",)], ids=("all", "z"))
def test_a_large_dstate_is_mirrored_in_parts_too(wanted):
    """What adds up two roundings of outputs that nearly cancel is judged by a mirror that does."""
    config = replace(EVERYTHING, heads_per_group=1, dtype="bf16", seqlen=20, dstate=160, wanted=wanted)
    problem = operator.problem(config, 0, "cpu")
    ways = trial._truth(problem)[1]
    whole, *_, in_parts = [mirror(problem.tensors, problem.wanted, ways) for mirror in problem.mirrors]
    assert in_parts.keys() == whole.keys()
    for name, t in in_parts.items():
        assert t.dtype == whole[name].dtype and (t.double() - whole[name].double()).norm() < 0.02 * t.double().norm(), name


@pytest.mark.parametrize("each", (1, 2))
def test_heads_are_mirrored_in_splits(each):
    """The gradients of B and C are those of each split alone, added up; the last of three heads is a split by itself."""
    config = replace(EVERYTHING, dtype="bf16", seqlen=3, ngroups=1, heads_per_group=3, wanted=("B", "C"))
    problem = operator.problem(config, 0, "cpu")
    ways = trial._truth(problem)[1]
    mirrors = [mirror for mirror in problem.mirrors if mirror.func is operator._mirror_by_split]
    assert [mirror.args[1] for mirror in mirrors] == [1, 2]
    sums = {"dB": 0.0, "dC": 0.0}
    for heads in torch.arange(3).split(each):
        cut = {name: t.index_select(axis, heads) for name, axis in operator._HEAD_AXES.items()
               if (t := problem.tensors.get(name)) is not None}
        wide = {name: problem.tensors[name].float() for name in ("B", "C")}
        alone = replace(config, heads_per_group=len(heads), state_dtype="bf16")
        parts = operator._mirror(alone, False, problem.tensors | cut | wide, problem.wanted, {
            name: t.index_select(operator._HEAD_AXES[name], heads) for name, t in ways.items()})
        sums = {name: value + parts[name] for name, value in sums.items()}
    got = mirrors[each - 1](problem.tensors, problem.wanted, ways)
    assert got.keys() == sums.keys()
    assert all(torch.equal(got[name], value.bfloat16()) for name, value in sums.items())


@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_faults_in_one_token_of_one_head_are_found(dtype, monkeypatch):
    """Though D x makes the output large, and dB is small beside it."""
    config = Config(seed=6, dtype=dtype, headdim=4, D="h", state_dtype="bf16", wanted=("B", "C"))
    assert trial.run(config, "cpu").status == "passed"
    monkeypatch.setattr(torch_variant, "VARIANT", FAULTS["dB scaled"])
    outcome = trial.run(config, "cpu")
    assert outcome.failed and outcome.why.startswith("dB")


def test_what_ends_its_process_is_named(fork_workers):
    """And the batch after it is run, by another process."""
    lines = [to_json(EVERYTHING), to_json(replace(EVERYTHING, seed=4))]
    outcomes = find("ends its process", lines)
    assert list(outcomes) == lines
    assert all(outcome.failed and "died: signal SIGSEGV" in outcome.why for outcome in outcomes.values())


def test_what_hangs_is_named(fork_workers):
    line = to_json(EVERYTHING)
    (outcome,) = find("hangs", [line], timeout=1).values()
    assert outcome.failed and outcome.why.startswith("hung: no result after 1 s")


@pytest.mark.parametrize("given, seconds", [((), 60), (("--configs", 9), math.inf), (("--configs", 9, "--seconds", 5), 5)])
def test_what_is_asked_for_by_number_runs_whole(given, seconds, monkeypatch):
    plans = []
    monkeypatch.setattr(campaign, "run", lambda plan, console: plans.append(plan) or campaign.Tally())
    assert invoke("fuzz", *given).exit_code == 0 and plans[0].seconds == seconds


def test_kernels_are_interpreted_whatever_the_workers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(campaign, "run", lambda plan, console: campaign.Tally())
    assert invoke("fuzz", "--workers", 1).exit_code == 0 and os.environ["TRITON_INTERPRET"] == "1"


def test_a_whole_run(tmp_path, monkeypatch, console, fork_workers):
    """Counts, the failures made small, and a row as a GPU's would be."""
    made = replace(EVERYTHING, seqlen=20, mode="checkpoint", layouts={"x": "packed"})
    monkeypatch.setitem(DRAWS, "operator", lambda seed, index, variants, device, size: [
        replace(made, seed=index * size + n, wanted=("x", "A") if n else ("x",)) for n in range(size)])
    plan = campaign.Plan("operator", ("torch",), 0, 100, 6, 1, 3, 60, 60, tmp_path, partial(run_worker, "dA scaled"))
    tally = campaign.run(plan, console)
    assert tally.configs == 6 and len(tally.failures) == 4
    said = console.export_text()
    assert "ended by --configs" in said and "dA: rms error" in said
    shrunk = next(line for line in said.splitlines() if line.startswith("shrunk to ")).removeprefix("shrunk to ")
    small = from_json(shrunk)
    assert small.wanted == ("A",) and small.mode == "plain" and small.calls == 1 and not small.layouts
    assert len(record.read(tmp_path)) == torch.cuda.is_available()
    record.append(campaign.make_row(plan, tally, 1.0, [(shrunk, "dA")]), tmp_path / "again")
    (read,) = record.read(tmp_path / "again", bench="fuzz")
    assert read["failures"] == len(tally.failures) and read["failed"] == [{"config": json.loads(shrunk), "why": "dA"}]
    assert read["variants"] == {"torch": 6} and read["modes"] == {"checkpoint": 6} and read["configs"] == 6


def test_shrinking_finds_the_cause():
    """Each by itself and together; the chunk size stays a power of two."""
    start = replace(EVERYTHING, headdim=77, chunk_size=128, options={"exp2": False, "gluon": False}, mode="capture")

    def fails(c: Config) -> bool:
        return c.headdim > 9 and c.headdim % 2 == 1 and c.z and "exp2" in c.options

    small = shrink(start, lambda configs: [fails(c) for c in configs])
    assert small == Config(seed=3, headdim=11, z=True, options={"exp2": False})
    small = shrink(start, lambda configs: [c.chunk_size >= 64 and len(c.wanted) > 1 for c in configs])
    assert small.chunk_size == 64 and len(small.wanted) == 2 and small.headdim == 1


def test_one_wrong_head_of_many_is_told_by_number():
    truth = torch.randn(1, 64, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = truth.to(torch.bfloat16)
    wrong = rounded.clone()
    wrong[:, :, 7] *= 1.05
    problem = trial.PARTS["operator"].problem(EVERYTHING, 0, "cpu")
    problem = replace(problem, eps=2**-7, coarsest=2**-7)

    def list_failures(value):
        checks = judge.compare("out", value, truth, [rounded], problem)
        return [check.what for check in checks if not check.passed]

    assert not list_failures(rounded)
    assert any(what.startswith("out, head (0, 7)") for what in list_failures(wrong))


def test_a_configuration_again(tmp_path):
    """From a file, as a run printed it; what is drawn otherwise is not looked at."""
    lines = tmp_path / "failed.jsonl"
    lines.write_text("\n".join(to_json(c) for c in (EVERYTHING, replace(EVERYTHING, mode="no such"))))
    result = invoke("fuzz", "--config", f"@{lines}", "--shrink", 0)
    assert result.exit_code == 1
    assert "passed in" in result.output and "ValueError: mode: got 'no such', expected one of plain" in result.output
