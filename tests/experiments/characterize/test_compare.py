"""Pairs, the band of noise at its edges, and what the command prints, refuses and returns."""

import pytest

from experiments import record
from experiments.characterize.compare import compare, rows_of
from tests.experiments.invoke import invoke
from tests.experiments.rows import ssd_row, write

OLD, NEW = "1" * 40, "2" * 40


def make_row(graph_us, p50_us=1000.0, half_width=1.0, **other):
    return ssd_row(graph_p50_us=graph_us, p50_us=p50_us, p20_us=p50_us - half_width, p80_us=p50_us + half_width, **other)


@pytest.mark.parametrize("old, new, expected", [(1000, 1049, "same"), (1000, 1051, "slower"), (1051, 1000, "faster"),
                                                (1049, 1000, "same")])
def test_verdict(old, new, expected):
    (pair,) = compare([make_row(old)], [make_row(new)], noise=0.05).pairs
    assert (pair["verdict"], pair["of"], pair["ratio"]) == (expected, "graph", new / old)


def test_wide_percentiles_widen_the_band():
    (pair,) = compare([make_row(None, half_width=40.0)], [make_row(None, 1080.0, half_width=54.0)], noise=0.05).pairs
    assert pair["band"] == pytest.approx(0.04 + 0.05) and pair["of"] == "eager"
    assert pair["verdict"] == "same", "8 % slower, with medians known to 9 %"


def test_percentiles_of_a_host_say_nothing_about_a_graph():
    """Eager calls of 1000 us whose kernels take 500: their scatter is the host's."""
    (pair,) = compare([make_row(500.0, half_width=300.0)], [make_row(530.0, half_width=300.0)], noise=0.05).pairs
    assert (pair["band"], pair["verdict"]) == (0.05, "slower")


def test_pairs_by_what_was_measured():
    old = [make_row(100.0), make_row(100.0, mode="bwd"), make_row(100.0, chunk_size=64), ssd_row("fused", graph_p50_us=80.0)]
    new = [make_row(90.0, time="2026-01-01T00:00:00+00:00"), make_row(130.0, time="2026-01-02T00:00:00+00:00"),
           make_row(100.0, mode="bwd"), ssd_row("persistent")]
    found = compare(old, new)
    pairs = [(pair["what"], pair["new"]) for pair in found.pairs]
    assert pairs == [("8b-b4 fwd", 130.0), ("8b-b4 bwd", 100.0)], "the latest, worst first"
    assert (found.only_old, found.only_new) == (2, 1)


def test_training_runs_pair_by_their_settings_and_not_their_length():
    def train(p50_us, **run):
        row = {key: value for key, value in make_row(None, p50_us).items() if key not in record.SIZES and key != "shape"}
        return row | {"bench": "train", "workload": "mamba2", "preset": "tiny", "run": {"steps": 10, "lr": 1e-3} | run}

    assert len(compare([train(100.0)], [train(100.0, steps=20), train(100.0, lr=1e-2)]).pairs) == 1


def test_nothing_in_common():
    with pytest.raises(ValueError, match="no measurement is in both: 1 are in the old set, 2 in the new"):
        compare([make_row(1.0)], [make_row(1.0, mode="bwd"), make_row(1.0, variant="fused")])


@pytest.fixture
def results(tmp_path):
    write(tmp_path, make_row(100.0, git_sha=OLD), make_row(150.0, git_sha=NEW))
    return tmp_path


@pytest.mark.parametrize("arguments, status", [(("1111", "2222"), 0), (("1111", "2222", "--fail"), 1),
                                               (("2222", "1111", "--fail"), 0)])
def test_commits_on_the_command_line(results, arguments, status):
    result = invoke("compare", *arguments, "--out", results)
    assert result.exit_code == status and ("slower" if arguments[0] == "1111" else "faster") in result.stdout


def test_a_commit_without_rows_is_refused_with_the_newest_that_have_some(tmp_path):
    write(tmp_path, *(make_row(1.0, git_sha=f"{n:02}" * 20, time=f"2026-11-20T12:{n:02}:00+00:00") for n in range(12)))
    with pytest.raises(FileNotFoundError, match=r"got HEAD, .* at, the newest 10 of 12: 1111111, 1010101, .*, 0202020$"):
        rows_of("HEAD", tmp_path)


def test_the_start_of_several_commits_is_refused(tmp_path):
    write(tmp_path, make_row(1.0, git_sha="1a" * 20), make_row(1.0, git_sha="1b" * 20))
    with pytest.raises(ValueError, match="got '1', with which 2 commits start, expected more digits"):
        rows_of("1", tmp_path)
