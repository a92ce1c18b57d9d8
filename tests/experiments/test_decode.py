"""The bench of generation, at a tiny size: its rows, and the tokens of other libraries with our weights."""

import io

import pytest
import torch
from rich.console import Console

from experiments import decode, record, table
from experiments.shapes import DECODE_RIVALS
from experiments.workloads import Preset, get_workload
from tests.experiments.small import sizes

pytestmark = pytest.mark.usefixtures("small")


def run(tmp_path, rivals, batches=(1, 2)) -> tuple[list[dict], str]:
    console = Console(width=200, record=True, file=io.StringIO())
    return decode.run(["small"], batches, 5, 8, "torch", rivals, "fp32", tmp_path, console, 2), console.export_text()


@pytest.fixture
def clock(monkeypatch):
    """Seconds: a call of ours takes 2 and 1 for each token, one of the rival twice as long."""
    passed = 0.0

    def generates(seconds):
        def generate(ids, new):
            nonlocal passed
            passed += seconds * (2 + new)
            return torch.cat([ids, ids.new_zeros(len(ids), new)], 1)

        return generate

    monkeypatch.setattr(decode.time, "perf_counter", lambda: passed)
    monkeypatch.setattr(decode, "make_sides", lambda *_: [decode.Side("torch", True, "fp32", generates(1)),
                                                         decode.Side("mamba_ssm", True, "fp32", generates(2), "slow")])


def test_rows(tmp_path, clock):
    rows, _ = run(tmp_path, ("transformers", "mamba_ssm"))
    assert rows == record.read(tmp_path, bench="decode") == decode.read_latest(tmp_path)
    keys = ("batch", "mode", "variant", "p50_us", "units_per_s", "speedup", "against", "note")
    assert [tuple(row.get(key) for key in keys) for row in rows] == [row for batch in (1, 2) for row in (
        (batch, "prefill", "torch", 3e6, batch * 5 / 3, 2.0, "mamba_ssm", None),
        (batch, "token", "torch", 1e6, batch, 2.0, "mamba_ssm", None),
        (batch, "prefill", "mamba_ssm", 6e6, batch * 5 / 6, None, None, "slow"),
        (batch, "token", "mamba_ssm", 2e6, batch / 2, None, None, "slow"))]
    assert all(row["same_tokens"] == 1 and row["seqlen"] == 5 and row["tokens"] == 8 for row in rows)
    assert "2.00" in table.render(rows, "markdown", table.DECODE)
    assert {row["against"] for row in decode.read_comparisons(tmp_path)} == {"mamba_ssm, slow"}, "whose handicap is said"


def test_a_model_generates_and_what_is_missing_is_said_once(tmp_path, monkeypatch):
    def refuse(model):
        raise ImportError("rival is not installed")

    monkeypatch.setitem(decode.RIVALS, "mamba_ssm", refuse)
    rows, said = run(tmp_path, ("mamba_ssm",))
    assert {(row["batch"], row["mode"]) for row in rows} == {(b, m) for b in (1, 2) for m in ("prefill", "token")}
    assert all(row["p50_us"] > 0 and "speedup" not in row for row in rows if not row["graph"])
    assert said.count("mamba_ssm is left out: rival is not installed") == 1


@pytest.mark.parametrize("rival", DECODE_RIVALS)
def test_another_library_generates_the_same_tokens(rival, tmp_path, monkeypatch):
    """With large weights, so that a token depends on those before it."""
    pytest.importorskip(rival)
    taken_by_all = sizes("MM", tie_embeddings=True, d_model=64, ngroups=1, chunk_size=64)
    monkeypatch.setitem(get_workload("mamba2").presets, "small", Preset(taken_by_all, batch=1, lr=1))
    load = decode.RIVALS[rival]

    def spread(ours):
        torch.manual_seed(1)
        for parameter in ours.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        return load(ours)

    monkeypatch.setitem(decode.RIVALS, rival, spread)
    rows, said = run(tmp_path, (rival,), (2,))
    assert {row["same_tokens"] for row in rows if row["variant"] in ("torch", rival)} == {1.0}, said
    assert rival in {row["variant"] for row in rows}


def test_a_transformers_that_knows_no_groups_is_left_out(tmp_path, monkeypatch):
    norm = pytest.importorskip("transformers.models.mamba2.modeling_mamba2").MambaRMSNormGated
    make = norm.__init__

    def make_older(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.__dict__.pop("group_size", None)

    monkeypatch.setattr(norm, "__init__", make_older)
    rows, said = run(tmp_path, ("transformers",), (2,))
    assert "transformers" not in {row["variant"] for row in rows} and "normalises all groups together" in said
