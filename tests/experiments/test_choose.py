"""Tables for "auto" from rows that nobody measured; and the check of the committed ones."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments import bench, choose, record
from ssd.types import Options
from ssd.variant_times import TABLES, Call, TimeTable, apply_model, count_work
from tests.experiments.invoke import invoke
from tests.experiments.rows import ENVIRONMENT, ssd_row, write

CALL = Call("fwd", False, 2, batch=4, seqlen=4096, nheads=128, headdim=64, dstate=128, ngroups=8, chunk_size=128)
VISION = replace(CALL, batch=128, seqlen=196, nheads=5, headdim=32, dstate=16, ngroups=1)


@pytest.fixture(autouse=True)
def _few_calls_are_enough(monkeypatch):
    """For rows that a test makes up. `tables`, of committed rows, are made before this holds."""
    monkeypatch.setattr(choose, "FEWEST", 1)


def test_a_gpu_with_few_calls_has_no_table(monkeypatch):
    calls = (("NVIDIA H200", 64), ("NVIDIA H200", 128), ("NVIDIA H200", 256), ("NVIDIA H100", 64), ("NVIDIA H100", 128))
    rows = [ssd_row(gpu=gpu, chunk_size=chunk_size) for gpu, chunk_size in calls]
    monkeypatch.setattr(choose, "FEWEST", 3)
    assert choose.make_tables(rows).keys() == {"h200"}


def test_the_latest_row_of_each_kernels_counts():
    rows = [
        ssd_row("fused", p50_us=100.0), ssd_row("persistent", p50_us=710.0), ssd_row("fused", p50_us=810.0),
        ssd_row("baseline", p50_us=910.0), ssd_row("baseline", p50_us=610.0, graph_p50_us=None, chunk_size=256),
        ssd_row("persistent", p50_us=310.0, gpu="NVIDIA L4")]
    unread = [
        ssd_row("mamba_ssm", p50_us=11.0),  # nothing of ours
        ssd_row("auto", p50_us=11.0),  # of kernels that nobody noted
        ssd_row("baseline", p50_us=11.0, options={"exp2": False}),  # not as it comes
        ssd_row("baseline", p50_us=11.0, options={"forgotten": True}),
        ssd_row("fused", mode="fwd_bwd", p50_us=11.0),
        ssd_row("fused", p50_us=11.0, gpu=None), ssd_row("fused", p50_us=11.0, bench="counters")]
    tables = choose.make_tables(rows + unread)
    assert tables["h200"].calls == {
        CALL: {"fused on Hopper": 800.0, "persistent on Hopper": 700.0, "baseline": 900.0},
        replace(CALL, chunk_size=256): {"baseline": 610.0}}
    assert tables["l4"].calls == {CALL: {"persistent off Hopper": 300.0}} and tables.keys() == {"h200", "l4"}


@pytest.mark.parametrize(("row", "call", "kernels"), [
    ({"variant": "auto", "mode": "bwd", "ran": "fused on Hopper"}, {"mode": "bwd"}, "fused on Hopper"),
    ({"mode": "fwd_train"}, {"keeps": True}, "persistent on Hopper"),
    ({"mode": "bwd"}, {"mode": "bwd", "keeps": True}, "fused on Hopper"),
    ({"mode": "bwd", "options": {"save_states": False}}, {"mode": "bwd"}, "fused on Hopper"),
    ({"mode": "bwd", "options": {"gluon": False}}, {"mode": "bwd", "keeps": True}, "fused"),
    ({"mode": "bwd", "options": {"fuse_backward": False}}, {"mode": "bwd", "keeps": True}, "baseline"),
    ({"bench": "ablate", "options": {"gluon": False, "tf32": False}}, {}, "persistent"),
    ({"shape": "gated", "ran": "of its own"}, {"batch": 2, "gated": True}, "of its own"),
    ({"shape": "nemotron-nano-9b-v2"}, {"batch": 2, "headdim": 80}, "persistent"),
    ({"dtype": "fp32"}, {"itemsize": 4}, "persistent"),
], ids=str)
def test_a_row_is_of_a_call_and_of_kernels(row, call, kernels):
    """Those that it names, or, of a row too old for that, those of its time."""
    row = ssd_row(**{"variant": "persistent"} | row, p50_us=110.0)
    assert choose.make_tables([row])["h200"].calls == {replace(CALL, **call): {kernels: 100.0}}


def test_a_row_names_the_kernels_that_ran(monkeypatch):
    """By the code at the time of the measurement, which another may contradict later."""
    row = ssd_row("persistent", mode="bwd", options=vars(Options()))
    assert choose.name_kernels(row) == "fused on Hopper"
    assert choose.name_kernels(row | {"gpu": "NVIDIA A100-SXM4-40GB"}) == "fused"
    auto = row | {"variant": "auto"}
    assert choose.name_kernels(auto | {"mode": "fwd"}) == "persistent on Hopper"
    for other in ({"mode": "fwd_bwd"}, {"variant": "mamba_ssm", "options": None}, {"gpu": None},
                  {"variant": "auto", "options": vars(Options(keep_bytes=1))}):
        assert choose.name_kernels(row | other) is None
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    setting = SimpleNamespace(shape=choose.SHAPES["8b-b4"], dtype_name="bf16")
    times = {"p50_us": 110.0, "graph_p50_us": 100.0}
    measured = bench.make_row("ssd", setting, "bwd", bench.Candidate("persistent", 128), times, 4000.0)
    monkeypatch.setattr(choose, "name_kernels", lambda *_: "others")
    assert choose.make_tables([measured])["h200"].calls.popitem()[1].keys() == {"fused on Hopper"}


def list_calls():
    for chunk_size in (64, 256):
        for shape in choose.SHAPES.values():
            yield Call("fwd", False, 2, **shape.sizes, chunk_size=chunk_size)


def test_constants_of_times_are_found():
    """Of times that the model itself gives, but for the little that constants are trusted before."""
    constants = dict.fromkeys(count_work(CALL), 0.0) | {"launch": 12.0, "tokens": 0.5, "steps": 3.0}
    calls = {call: {"fused": apply_model(constants, call)} for call in list_calls()}
    (found,) = choose._fit(calls).values()
    for call, times in calls.items():
        assert apply_model(found, call) == pytest.approx(times["fused"], rel=0.05)
    assert min(found.values()) >= 0 and found["launch"] == pytest.approx(12.0, rel=0.05)


def test_what_no_row_tells_stays_as_it_was_taken_to_be():
    (found,) = choose._fit({CALL: {"fused": apply_model(choose._BEFORE, CALL)}}).values()
    assert found == pytest.approx(choose._BEFORE, rel=1e-3)


def test_the_check_finds_a_wrong_choice():
    """Of two sizes alike, one whose times are the other way round: to each, the other is what is known."""
    near = replace(CALL, seqlen=8192)
    calls = {CALL: {"fused on Hopper": 100.0, "baseline": 110.0}, near: {"fused on Hopper": 250.0, "baseline": 200.0}}
    choices = {one.call: one for one in choose.check_choices("h200", TimeTable({}, calls), choose.SCOPES["the call"])}
    assert choices[near].chosen == "fused on Hopper" and choices[near].cost == pytest.approx(0.25)
    assert choices[CALL].chosen == "baseline" and choices[CALL].cost == pytest.approx(0.10)
    text = choose.tabulate_choices({"h200": TimeTable({}, calls)})
    assert f"| the call | {near} | fused on Hopper | baseline | 25.0% |" in text


def test_the_check_leaves_out_what_it_says():
    calls = {replace(CALL, chunk_size=size): {"fused on Hopper": 100.0, "baseline": 110.0} for size in (64, 128)}
    together = choose.check_choices("h200", TimeTable({}, calls), choose.SCOPES["every call of its sizes"])
    assert together == [], "nothing is left to choose by"
    assert len(choose.check_choices("h200", TimeTable({}, calls), choose.SCOPES["the call"])) == 2
    alone = {CALL: {"fused on Hopper": 100.0}, VISION: {"fused": 100.0}}
    assert choose.check_choices("h200", TimeTable({}, alone), choose.SCOPES["the call"]) == [], "nothing to choose from"


@pytest.fixture(scope="module")
def tables():
    return choose.make_tables(record.read_gpus())


@pytest.mark.parametrize("scope", choose.SCOPES)
def test_choices_come_near_to_the_best(tables, scope):
    """The bounds of what a choice may cost where its own rows are left out, in all committed rows of each GPU."""
    for gpu, table in tables.items():
        costs = [one.cost for one in choose.check_choices(gpu, table, choose.SCOPES[scope])]
        assert max(costs, default=0) <= choose.FAR, gpu
        assert sum(cost <= choose.CLOSE for cost in costs) >= choose.SHARE * len(costs), gpu


def test_tables_are_those_of_the_committed_rows(tables):
    """`make choose` has been run since the last row came, and since other inputs became those of the Hopper kernels."""
    assert {path.stem for path in TABLES.glob("*.json")} == {*tables}
    for gpu, table in tables.items():
        shipped = TimeTable.read((TABLES / f"{gpu}.json").read_text())
        assert shipped.calls == table.calls, f"{gpu}: run make choose"
        for name, constants in table.constants.items():
            assert shipped.constants[name] == pytest.approx(constants, rel=1e-2, abs=1e-3), f"{gpu}: run make choose"


def test_command(tmp_path, monkeypatch):
    rows, folder = tmp_path / "rows", tmp_path / "tables"
    monkeypatch.setattr(choose.write_tables, "__defaults__", (folder,))
    written = [ssd_row(), ssd_row("fused", p50_us=11.0, options=vars(Options()))]
    write(rows, *written)
    result = invoke("choose", "--out", rows)
    assert result.exit_code == 0, result.output
    assert "h200.json written: 1 measured calls" in result.stdout.replace("\n", "")
    assert TimeTable.read((folder / "h200.json").read_text()) == choose.make_tables(written)["h200"]
    (tmp_path / "none").mkdir()
    assert "nothing to choose by" in invoke("choose", "--out", tmp_path / "none").stdout
