"""The bench of packed documents: their lengths, its table, and a small run where there is a GPU."""

import pytest

from experiments import documents
from experiments.shapes import Shape
from experiments.terminal import make_console


@pytest.mark.parametrize(("tokens", "mean"), [(16384, 700), (100, 700), (64, 64), (5000, 64), (65, 64)])
def test_lengths_fill_the_row(tokens, mean):
    for seed in range(20):
        lengths = documents.draw_lengths(tokens, mean, seed)
        assert sum(lengths) == tokens and lengths == documents.draw_lengths(tokens, mean, seed)
        assert min(lengths) >= min(tokens, documents.SHORTEST)
        assert max(lengths) < documents.LONGEST + documents.SHORTEST


def test_lengths_have_the_mean():
    lengths = documents.draw_lengths(2**21, 700, 0)
    assert 650 < sum(lengths) / len(lengths) < 750


def row(way, us, **more):
    return {"bench": "documents", "gpu": "NVIDIA H100", "shape": "8b-b4", "mode": "fwd", "variant": "persistent", "way": way,
            "seqlen": 16384, "ndocs": 24, "graph_p50_us": us, "p50_us": us + 50, "time": "now"} | more


def test_table():
    said = documents.tabulate([row("one", 300.0), row("states", 450.0), row("copy", 80.0), row("every 256", 320.0),
                               row("one", 999.0, mode="bwd", time="before")])
    assert "| documents with states | persistent | fwd | 16,384 in 24 documents | H100 | 450 | 1.50 |" in said
    assert "| copy of those states | persistent | fwd | 16,384 in 24 documents | H100 | 80 |  |" in said
    later = [row("one", 200.0, time="later"), row("states", 900.0, ndocs=99)]
    said = documents.tabulate([row("one", 300.0), row("states", 450.0), row("every 256", 330.0), *later])
    assert "256 tokens | persistent | fwd | 16,384 in 24 documents | H100 | 330 | 1.10 |" in said, "beside its own run"
    assert "24 documents | H100 | 450 |" in said and "99 documents | H100 | 900 |" in said
    assert "No rows yet" in documents.tabulate([])


@pytest.mark.gpu
def test_run(tmp_path):
    shape = Shape("small", 2, 512, nheads=4, headdim=64, dstate=64, ngroups=1)
    rows = documents.run(["auto"], [shape], ["fwd", "bwd"], "bf16", 100, [256], None, tmp_path, make_console(), 2, 1)
    assert {row["way"] for row in rows} == {"one", "packed", "states", "copy", "every 256"}
    assert all(row["graph_p50_us"] > 0 for row in rows)
