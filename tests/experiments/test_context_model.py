"""The model of time on many GPUs: constants that rows were made from, and how far it is from the committed ones."""

import pytest

from experiments import context_model, record
from experiments.context_model import Model
from tests.experiments.rows import ENVIRONMENT

TRUE = {"fwd": Model("fwd", 20.0, 0.02, 150.0, 300.0), "fwd_bwd": Model("fwd_bwd", 0.0, 0.1, 300.0, 300.0)}


def make_row(model: Model, seqlen: int) -> dict:
    return ENVIRONMENT | {"part": "scan", "mode": model.mode, "seqlen": seqlen, "ranks": 2, "variant": "auto",
                          "link_gbps": 300.0, "graph_p50_us": model.parts(seqlen, 2), "alone_graph_p50_us": model.alone(seqlen)}


def test_constants_are_found():
    rows = [make_row(model, seqlen) for model in TRUE.values() for seqlen in (8192, 65536, 262144)]
    for mode, found in context_model.fit(rows).items():
        constants = (found.start, found.token, found.cut, found.link_gbps)
        assert constants == pytest.approx(tuple(vars(TRUE[mode]).values())[1:], rel=1e-6, abs=1e-6)
    assert context_model.fit(rows[:5]).keys() == {"fwd"} and "No rows yet" in context_model.tabulate(rows[:5])
    slower = [make_row(Model("fwd", -20.0, 0.02, 150.0, 300.0), seqlen) for seqlen in (8192, 65536, 262144)]
    assert context_model.fit(slower)["fwd"].start == 0


def test_times_by_hand():
    """4.2 MB of each other rank: at 300 GB/s in one host, at 50 beyond."""
    model = TRUE["fwd"]
    assert model.parts(65536, 2) == pytest.approx(20 + 0.02 * 32768 + 150 + 4.256272 / 0.3, rel=1e-3)
    assert model.parts(65536, 64) == pytest.approx(20 + 0.02 * 1024 + 150 + 63 * 4.256272 / 0.05, rel=1e-3)
    assert model.all_to_alls(65536, 2) == pytest.approx(20 + 0.02 * 32768 + 876.6 / 0.3, rel=1e-3)
    assert model.all_to_alls(65536, 512) is None


def test_committed_rows():
    """Within 10 % also of all-to-alls, to which nothing is fitted."""
    rows = record.read(record.read_gpus(), bench="context")
    models = context_model.fit(rows)
    compared = [row for row in record.latest(rows, lambda row: (row["gpu"], row["part"], row["mode"], row["seqlen"]))
                if row["part"] == "scan" and "H100" in row["gpu"]]
    assert len(compared) >= 6
    for row in compared:
        model, seqlen, ranks = models[row["mode"]], row["seqlen"], row["ranks"]
        assert model.alone(seqlen) == pytest.approx(row["alone_graph_p50_us"], rel=0.1)
        assert model.parts(seqlen, ranks) == pytest.approx(row["graph_p50_us"], rel=0.1)
        assert model.all_to_alls(seqlen, ranks) == pytest.approx(row["all_to_all_graph_p50_us"], rel=0.1)
