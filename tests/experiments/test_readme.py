import re

import pytest

from experiments import ablate, block, figure, readme, record, sweep, table
from tests.experiments.rows import ENVIRONMENT, compared, ssd_row

ROWS = [
    ssd_row(mode="fwd", p50_us=1100.0, **compared(1.05)),
    ssd_row(mode="bwd", p50_us=4400.0, **compared(0.91)),
    ssd_row(shape="8b-b1", p50_us=300.0, **compared(1.0)),
    ssd_row("mamba_ssm", mode="fwd", p50_us=1150.0),
    ssd_row("mamba_ssm", mode="bwd", p50_us=4000.0),
]


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "README.md"
    parts = (f"<!-- {section}: written by `make readme` -->\nstale {section}\n<!-- end of {section} -->\n"
             for section in ("claim", "results", "memory", "blocks", "workloads", "gains"))
    path.write_text(f"before\n{''.join(parts)}after\n")
    (tmp_path / "docs").mkdir()
    return path


def update(page, rows, check=False):
    return readme.update(rows, page, page.parent / "docs" / "results.svg", check)


def test_check_finds_what_is_stale_and_changes_nothing(page):
    before = page.read_text()
    assert not update(page, ROWS, check=True)
    assert page.read_text() == before and not (page.parent / "docs" / "results.svg").exists()


def test_update_writes_losses_too(page):
    assert not update(page, ROWS)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale results" not in text
    assert "stale workloads" in text
    assert "| 8b-b4 | backward | baseline | 128 | 4400 | 4390 |" in text and "| 0.91 / 0.91 |" in text
    assert "![" in text and "(docs/results.svg)" in text
    assert update(page, ROWS, check=True)


def test_claim(page):
    """Of each shape the fastest variant counts, by its time in a graph; a rival's own rows and rows without one do not."""
    rows = [*ROWS, ssd_row("fused", **compared(2.5)), ssd_row("persistent", shape="8b-b1", **compared(3.25) | {"speedup": 9.0}),
            ssd_row("fused", mode="fwd_bwd", **compared(1.75)), ssd_row("fused", shape="8b-b8")]
    update(page, rows)
    text = " ".join(page.read_text().split())
    assert "over mamba_ssm on one NVIDIA H200" in text and "stale claim" not in text
    assert "each of 2 shapes: 2.50 to 3.25 forward, 0.91 to 0.91 backward and 1.75 to 1.75 forward and backward." in text
    assert "By default" not in text
    update(page, [*rows, ssd_row("auto", **compared(1.5))])
    assert "for the backward: 1.50 to 1.50 forward." in " ".join(page.read_text().split())
    update(page, [ssd_row()])
    assert "No GPU has run the bench beside a rival yet" in page.read_text()


def test_forward_and_backward_have_a_table(page):
    whole = [ssd_row(mode="fwd_bwd", p50_us=5500.0, **compared(0.95)), ssd_row("mamba_ssm", mode="fwd_bwd", p50_us=5200.0),
             ssd_row("fused", shape="8b-b8", mode="fwd_bwd", p50_us=900.0)]
    update(page, [*ROWS, *whole])
    for line in ("| shape | baseline | mamba_ssm | fused |", "| 8b-b4 | 5490 (0.95) | 5190 |  |", "| 8b-b8 |  |  | 890 |"):
        assert line in page.read_text()


def test_the_commits_of_the_rows_are_named(page):
    later = ROWS[0] | {"git_sha": "1" * 40, "time": "2026-01-02T00:00:00+00:00"}
    update(page, [later, *ROWS[1:]])
    assert "device copy 4270 GB/s, rows of 0000000 and 1111111. In" in page.read_text()


def test_a_new_row_makes_both_stale(page):
    update(page, ROWS)
    newer = [*ROWS, ssd_row("torch", p50_us=9999.0)]
    assert not update(page, newer, check=True)
    assert figure.drawn_from(page.parent / "docs" / "results.svg") != figure.fingerprint(figure.points(newer))


def test_no_rows(page):
    update(page, [])
    assert "No rows yet" in page.read_text()
    assert update(page, [], check=True)


def test_markers_are_required(page):
    page.write_text("no markers")
    with pytest.raises(ValueError, match=r"README\.md: expected the lines"):
        update(page, ROWS)


def test_figure_points():
    points = figure.points(ROWS)
    assert points["fwd"]["8b-b4"] == {"baseline": 1090.0, "floor": 608e6 / 4270 / 1e3, "mamba_ssm": 1140.0}
    assert list(points["fwd"]) == ["8b-b1", "8b-b4"]


def test_the_readme_shows_the_committed_rows():
    assert readme.update(readme.committed(), check=True), "run `make readme`"
    assert readme.update_ablation(ablate.committed(), check=True)
    assert readme.update_memory(table.committed(all_chunks=True), check=True)
    assert readme.update_blocks(block.committed(), check=True) and readme.update_workloads(sweep.committed(), check=True)
    assert readme.update_trainings(record.read(bench="train"), check=True)


def test_workloads(page):
    """Variants as they come: an option that is switched off is another table's."""
    steps = [step_row("mamba_ssm", 200.0, 50.0), step_row("fused", 160.0, 12.0, speedup=1.25),
             step_row("fused", 170.0, 20.0, options={"exp2": False})]
    drawn = page.parent / "docs" / "workloads.svg"

    def update_steps(rows, check=False):
        return readme.update_workloads(rows, page, drawn, page, check)

    assert not update_steps(steps, check=True) and not drawn.exists()
    assert not update_steps(steps) and update_steps(steps, check=True)
    text = page.read_text()
    assert "stale results" in text and "stale workloads" not in text
    line = r"\| mamba2 +\| 1\.3b +\| ssd +\| +4 \| +4096 \| bf16 +\| fused +\| +160\.0 \|.* 7\.5 \|.* 1\.25 \|"
    assert re.search(line, text) and "170" not in text
    assert "mamba2 1.3b (ssd)" in drawn.read_text()
    assert not update_steps([*steps, step_row("persistent", 150.0, 10.0)], check=True)
    update_steps([])
    assert "No rows yet: no GPU has run the sweep" in page.read_text()


def test_gains():
    """Of 200 ms, 50 of them SSM, 40 are gained, 38 of these by SSM kernels; what was timed alone, or loses, gains nothing."""
    theirs = step_row("mamba_ssm", 200.0, 50.0)
    (*_, line) = readme.gains([theirs, step_row("baseline", 190.0, 40.0, speedup=1.05),
                               step_row("fused", 160.0, 12.0, speedup=1.25)]).splitlines()
    assert line == "| mamba2 | 1.3b | ssd | 4 | 200.0 | 25.0 % | fused | 160.0 | 7.5 % | 1.25 | 4.17 | 95 % |"
    (*_, line) = readme.gains([theirs, step_row("fused", 250.0, 60.0, speedup=0.8)]).splitlines()
    assert line.endswith("| fused | 250.0 | 24.0 % | 0.80 | 0.83 |  |")
    assert readme.gains([theirs, step_row("fused", 160.0, 12.0)]).startswith("No rows yet")


def test_memory(page):
    """Of two shapes; what a forward keeps is from the row of the same shape, variant, chunk size and options."""
    whole = ssd_row("fused", mode="fwd_bwd", p50_us=1400.0) | {"peak_mib": 1660.5}
    kept = ssd_row("fused", mode="fwd_train") | {"saved_mib": 512.0}
    without = whole | {"options": {"save_states": False}, "peak_mib": 1152.3}
    others = whole | {"shape": "8b-b1", "peak_mib": 99.0}, whole | {"shape": "2.7b-b4", "peak_mib": 77.0}
    assert not readme.update_memory([whole, kept, without, *others], page)
    text = page.read_text()
    assert "| fused | 128 | 512 | 1660 | 1390 |\n| fused, save_states=False | 128 |  | 1152 | 1390 |\n" in text
    assert "| fused | 128 |  | 99 | 1390 |" in text.partition("8b-b4")[0]
    assert "77" not in text and "stale memory" not in text and "stale blocks" in text
    readme.update_memory([], page)
    assert "No rows yet: no GPU has run forward and backward of these shapes" in page.read_text()


def test_blocks(page):
    """Ours, with what it is compared to."""
    ours = ssd_row("ssd", mode="bwd", p50_us=334.0, **compared(1.48)) | {"part": "conv1d"}
    assert not readme.update_blocks([ours, ours | {"variant": "causal_conv1d", "against": None}], page, check=True)
    assert not readme.update_blocks([ours], page) and readme.update_blocks([ours], page, check=True)
    text = page.read_text()
    assert re.search(r"\| conv1d \| 8b-b4 +\| bwd +\| +334 \|.* 14\.2 \| mamba_ssm +\| +1\.48 \| +1\.48 \|", text)
    assert "stale blocks" not in text and "stale results" in text
    readme.update_blocks([], page)
    assert "No rows yet: no GPU has run `make block`" in page.read_text()


def test_ablation(tmp_path):
    page = tmp_path / "ablation.md"
    page.write_text("<!-- ablation: written by `make readme` -->\n<!-- end of ablation -->\n")
    times = {("all", None): 250.0, ("without", "exp2"): 300.0, ("none", None): 900.0, ("added", "exp2"): 800.0}
    rows = [ssd_row("fused", graph_p50_us=us) | {"bench": "ablate", "step": step, "changed": changed, "relative": us / 250}
            for (step, changed), us in times.items()]
    assert not readme.update_ablation(rows, page) and readme.update_ablation(rows, page, check=True)
    assert "8b-b4, forward, `fused`:\n\n| option |" in page.read_text()
    for line in ("| none | | | 900 | 3.60 |", "| exp2 | 300 | 1.20 | 800 | 3.20 |", "| all | 250 | 1.00 | | |"):
        assert line in page.read_text()
    rows = [row | {"changed": "save_states"} if row["changed"] else row for row in rows]
    readme.update_ablation(rows, page)
    assert "| save_states | not used |  | 800 | 3.20 |" in page.read_text()
    readme.update_ablation([row | {"mode": "bwd"} for row in rows], page)
    assert "| save_states | 300 | 1.20 | 800 | 3.20 |" in page.read_text()
    readme.update_ablation([], page)
    assert "No rows yet" in page.read_text()


TRAININGS = "".join(f"<!-- {name}: written by `make readme` -->\n<!-- end of {name} -->\n" for name in ("gpus", "seeds"))


def test_several_gpus(tmp_path):
    """Two in 60 ms of what one does in 100: 1.67 times, 83 %. What has not run on one GPU has nothing to be held against."""
    page = tmp_path / "workloads.md"
    page.write_text(TRAININGS)
    run = {"workload": "mamba2", "preset": "370m", "variant": "fused", "batch": 8, "seed": 0}
    one = {**ENVIRONMENT, "run": run, "variant": "fused", "gpus": 1, "way": None, "p50_us": 1e5, "loss": 6.0}
    two = one | {"gpus": 2, "way": "ddp", "link_gbps": 300.0, "p50_us": 6e4, "loss": 6.01}
    other = two | {"run": run | {"preset": "1.3b"}}
    assert not readme.update_trainings([one | {"p50_us": 9e9}, one, two, other], page)
    (line,) = [line for line in page.read_text().splitlines() if "ddp" in line]
    assert line == "| mamba2 | 370m | fused | 8 | 2 NVIDIA H200 | ddp | 300 | 60.0 | 100.0 | 1.67 | 83 % | 6.010 | 6.000 |"
    readme.update_trainings([other], page)
    assert "No rows yet: no GPUs have run" in page.read_text()


def test_several_seeds(tmp_path):
    """The last losses of each seed that two variants trained from; one seed alone says nothing of seeds."""
    page = tmp_path / "workloads.md"
    page.write_text(TRAININGS)

    def trained(seed: int, variant: str, loss: float, preset: str = "T") -> dict:
        run = {"workload": "mambavision", "preset": preset, "mixer": "mamba1", "steps": 200, "seed": seed, "variant": variant}
        return {**ENVIRONMENT, "run": run, "variant": variant, "gpus": 1, "way": None, "loss": loss}

    rows = [trained(0, "auto", 9.0), trained(0, "mamba_ssm", 3.3), trained(0, "auto", 3.333), trained(1, "auto", 3.6),
            trained(1, "mamba_ssm", 3.6), trained(2, "auto", 3.5), trained(0, "auto", 3.0, "B"),
            trained(0, "mamba_ssm", 3.0, "B")]
    readme.update_trainings(rows, page)
    assert [line for line in page.read_text().splitlines() if "mambavision" in line] == [
        "| mambavision | T | mamba1 | 200 | 0 | auto 3.333, mamba_ssm 3.300 | 1.00 % |",
        "| mambavision | T | mamba1 | 200 | 1 | auto 3.600, mamba_ssm 3.600 | 0.00 % |"]
    readme.update_trainings(rows[:3], page)
    assert "No rows yet: no GPU has trained" in page.read_text()


def step_row(variant: str, step_ms: float, ssd_ms: float, options: dict | None = None, speedup: float | None = None) -> dict:
    run = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "batch": 4}
    return {**ENVIRONMENT, **run, "run": run | {"variant": variant}, "sitting": "2026-11-20T12:00:00+00:00", "variant": variant,
            "seqlen": 4096, "dtype": "bf16", "options": None if variant == "mamba_ssm" else options or {},
            "p50_us": 1e3 * step_ms, "ssm_us": 1e3 * ssd_ms, "share": ssd_ms / step_ms, "units_per_s": 1e5, "unit": "tokens",
            "effective_gbps": 1000.0, "peak_mib": 5e4, "loss": 5.0, "speedup": speedup}
