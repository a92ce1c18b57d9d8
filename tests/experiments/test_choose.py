"""Tables for "auto", from rows that nobody measured."""

import json

from typer.testing import CliRunner

from experiments import choose
from experiments.__main__ import app
from ssd import auto_variant
from ssd.types import Options
from tests.experiments.rows import ssd_row, write

KEY = "fwd/2B/64/128/512/4096/128"


def test_the_fastest_comes_first_and_the_latest_row_counts():
    rows = [
        ssd_row("fused", p50_us=100.0),
        ssd_row("persistent", p50_us=700.0),
        ssd_row("fused", p50_us=800.0),
        ssd_row("baseline", p50_us=900.0),
        ssd_row("mamba_ssm", p50_us=10.0),  # nothing of ours
        ssd_row("baseline", p50_us=10.0, options={"exp2": False}),  # not as it comes
        ssd_row("baseline", p50_us=10.0, chunk_size=256),  # compared with nothing
        ssd_row("fused", mode="fwd_bwd", p50_us=10.0),
    ]
    assert choose.rank_variants(rows) == {"h200": {KEY: ["persistent", "fused", "baseline"]}}


def test_options_that_a_row_is_too_old_for_have_their_default():
    rows = [ssd_row("baseline", options={"tf32": False}), ssd_row("fused", options=vars(Options()), p50_us=1.0)]
    assert choose.rank_variants(rows) == {"h200": {KEY: ["fused", "baseline"]}}


def test_command(tmp_path, monkeypatch):
    rows, tables = tmp_path / "rows", tmp_path / "tables"
    monkeypatch.setattr(choose.write_tables, "__defaults__", (tables,))
    write(rows, ssd_row(), ssd_row("fused", p50_us=1.0), ssd_row(gpu="NVIDIA L4"))
    result = CliRunner().invoke(app, ["choose", "--out", str(rows)])
    assert result.exit_code == 0, result.output
    assert "h200.json written: 1 measured calls" in result.stdout.replace("\n", "") and "l4: nothing" in result.stdout
    assert json.loads((tables / "h200.json").read_text()) == {KEY: ["fused", "baseline"]}
    monkeypatch.setattr(auto_variant, "TABLES", tables)
    auto_variant._table.cache_clear()
    assert auto_variant._table("h200") == {auto_variant.Measured.of_key(KEY): ("fused", "baseline")}
    auto_variant._table.cache_clear()
