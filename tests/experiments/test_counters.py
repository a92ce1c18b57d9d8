"""ncu's output as text, since ncu itself needs a GPU."""

import io

import pytest
from rich.console import Console

from experiments import counters

from .rows import ssd_row

NAMES = ("ID", "Kernel Name", counters._TIME, counters._PCT, counters._READ, counters._WRITE, counters._OCCUPANCY,
         counters._REGISTERS, counters._L2_HITS)
LAUNCHES = (
    (0, "_chunk_state", 10_000, 50.0, 20_000_000, 4_000_000, 25.0, 128, 60.0),
    (1, "_chunk_state", 30_000, 70.0, 60_000_000, 40_800_000, 25.0, 128, 40.0),
    (2, "_bmm_chunk", 10_000, 10.0, 4_000_000, 800_000, 12.0, 96, 80.0),
)


def raw(*lines) -> str:
    return "==PROF== Profiling\n" + "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)


def test_parse():
    launches = counters.parse(raw(NAMES, ("",) * len(NAMES), *LAUNCHES))
    assert [launch["kernel"] for launch in launches] == ["_chunk_state", "_chunk_state", "_bmm_chunk"]
    assert launches[1][counters._READ] == 60_000_000


def test_parse_of_nothing():
    with pytest.raises(ValueError, match="no kernels"):
        counters.parse("==ERROR== no counters for you\n")


def test_kernels_are_weighted_with_time():
    state, bmm = counters._by_kernel(counters.parse(raw(NAMES, ("",) * len(NAMES), *LAUNCHES)))
    assert (state["launches"], bmm["launches"]) == (2, 1)
    assert state["dram_bytes"] == 124_800_000
    assert state["dram_pct"] == pytest.approx(65.0)
    assert state["l2_hit_pct"] == pytest.approx(45.0)


def test_report_shows_all_three_averages():
    launches = counters.parse(raw(NAMES, ("",) * len(NAMES), *LAUNCHES))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(counters._report(ssd_row(p50_us=40.0), launches, counters._by_kernel(launches)))
    text = " ".join(console.export_text().split())
    # 70 % of the peak is 100.8 MB in 30 us: the peak is 4.8 TB/s, of which 129.6 MB in 40 us are 67.5 %.
    for average in (
        "43.3 % mean over launches",
        "54.0 % weighted with time",
        "67.5 % of the peak",
        "0.2 times the ideal",
    ):
        assert average in text
