import re

import pytest

from experiments import figure, readme, result_tables, speedup_figure, terminal_page
from experiments.characterize.report import draw
from tests.experiments.rows import ENVIRONMENT, compared, ssd_row

ROWS = [
    ssd_row(mode="fwd", p50_us=1100.0, **compared(1.05)),
    ssd_row(mode="bwd", p50_us=4400.0, **compared(0.91)),
    ssd_row(shape="8b-b1", p50_us=300.0, **compared(1.0)),
    ssd_row("mamba_ssm", mode="fwd", p50_us=1150.0),
    ssd_row("mamba_ssm", mode="bwd", p50_us=4000.0),
]


@pytest.fixture
def root(tmp_path):
    """A tree of the pages that are written, with nothing but markers."""
    pages = {"README.md": ("speedups", "costs"), "docs/results.md": ("results", "memory", "blocks", "workloads"),
             "docs/workloads.md": ("gains", "seeds", "gpus"), "docs/ablation.md": ("ablation",),
             "docs/drop-in.md": ("libraries",), "docs/terminal.md": ("terminal-cpu", "terminal-gpu")}
    (tmp_path / "docs").mkdir()
    for page, sections in pages.items():
        parts = (f"<!-- {section}: written by `make readme` -->\nstale {section}\n<!-- end of {section} -->\n"
                 for section in sections)
        (tmp_path / page).write_text(f"before\n{''.join(parts)}after\n")
    return tmp_path


def read(root, page="docs/results.md"):
    return (root / page).read_text()


def lines_of(root, page, word):
    return [line for line in read(root, page).splitlines() if word in line]


def write_bench(root, rows, check=False, steps=()):
    return readme.write_bench(rows, steps, root, check)


def test_check_finds_what_is_stale_and_changes_nothing(root):
    before = read(root), read(root, "README.md")
    assert not write_bench(root, ROWS, check=True)
    assert (read(root), read(root, "README.md")) == before and not [*root.glob("docs/*.svg")]


def test_results_have_losses_too(root):
    assert not write_bench(root, ROWS)
    text = read(root)
    assert text.startswith("before\n") and text.endswith("after\n") and "stale results" not in text
    assert "stale workloads" in text
    assert "| 8b-b4 | backward | baseline | 128 | 4400 | 4390 |" in text and "| 0.91 / 0.91 |" in text
    assert "(results.svg)" in text and (root / "docs/results.svg").exists()
    assert write_bench(root, ROWS, check=True)


def test_speedups(root):
    """Ranges are of the fastest variant at each shape, by its time in a graph; lines are `persistent`'s alone."""
    rows = [*ROWS, ssd_row("fused", **compared(2.5)), ssd_row("persistent", shape="8b-b1", **compared(3.25) | {"speedup": 9.0}),
            ssd_row("fused", mode="fwd_bwd", **compared(1.75)), ssd_row("fused", shape="8b-b8"),
            ssd_row("persistent", p50_us=252.0, **compared(2.0)), ssd_row("persistent", mode="bwd", **compared(0.75))]
    write_bench(root, rows)
    text = " ".join(read(root, "README.md").split())
    assert "over mamba_ssm on one NVIDIA H200" in text and "stale speedups" not in text
    assert "of 2 shapes. The fastest variant: 2.5x to 3.2x forward, 0.9x to 0.9x backward and 1.8x to 1.8x forward and" in text
    assert "| Mamba-2 8B, 4 x 4096 | **2.0x** 242 µs | **0.8x** 990 µs | | - |" in text
    assert "(docs/speedups.svg)" in text and "The default" not in text
    write_bench(root, [*rows, ssd_row("auto", **compared(1.5))])
    assert "which keeps no states: 1.5x to 1.5x forward." in " ".join(read(root, "README.md").split())
    write_bench(root, [*rows, ssd_row("persistent", **compared(9.0)) | {"gpu": "NVIDIA H100"}])
    text = read(root, "README.md")
    assert text.count(" on one NVIDIA H") == 2 and "**9.0x**" not in text and "**2.0x**" in text, "one table"
    write_bench(root, [ssd_row()])
    assert "No GPU has run the bench beside mamba_ssm yet" in read(root, "README.md")


def test_the_training_step_is_of_the_model_with_that_layer(root):
    layer = ssd_row("persistent", **compared(2.0))
    other = step_row("persistent", 10.0, 5.0, speedup=9.0)
    steps = [step_row("persistent", 60.0, 5.0, speedup=1.25) | {"preset": "8b-width"}, other]
    write_bench(root, [layer], steps=steps)
    (line,) = lines_of(root, "README.md", "Mamba-2 8B")
    assert line.endswith("| **1.2x** 60 ms |")
    write_bench(root, [layer], steps=[steps[0] | {"speedup": None}, steps[1]])
    (line,) = lines_of(root, "README.md", "Mamba-2 8B")
    assert line.endswith("| - |")


def test_costs(root):
    """The default beside the fastest: the chunk size at which each takes least, with what its forward keeps."""
    whole = ssd_row("persistent", mode="fwd_bwd", p50_us=1235.0) | {"peak_mib": 1660.2}
    rows = [whole, whole | {"chunk_size": 64, "graph_p50_us": 2000.0}, whole | {"variant": "fused"}, whole | {"shape": "8b-b1"},
            ssd_row("persistent", mode="fwd_train") | {"saved_mib": 512.0}, ssd_row("persistent", mode="bwd", p50_us=873.0),
            whole | {"variant": "auto", "graph_p50_us": 1347.0, "peak_mib": 1120.0}]
    assert not readme.write_memory(rows, root)
    costs = [line for line in read(root, "README.md").splitlines() if line.startswith("| `")][1:]
    assert costs == ["| `auto` | 1347 |  |  | 1120 |", "| `persistent` | 1225 | 863 | 512 | 1660 |"]
    readme.write_memory([], root)
    assert "No rows yet: no GPU has run forward and backward of 8b-b4" in read(root, "README.md")


def test_forward_and_backward_have_a_table(root):
    whole = [ssd_row(mode="fwd_bwd", p50_us=5500.0, **compared(0.95)), ssd_row("mamba_ssm", mode="fwd_bwd", p50_us=5200.0),
             ssd_row("fused", shape="8b-b8", mode="fwd_bwd", p50_us=900.0)]
    write_bench(root, [*ROWS, *whole])
    for line in ("| shape | baseline | mamba_ssm | fused |", "| 8b-b4 | 5490 (0.95) | 5190 |  |", "| 8b-b8 |  |  | 890 |"):
        assert line in read(root)


def test_the_commits_of_the_rows_are_named(root):
    later = ROWS[0] | {"git_sha": "1" * 40, "time": "2026-01-02T00:00:00+00:00"}
    write_bench(root, [later, *ROWS[1:]])
    assert "device copy 4270 GB/s, rows of 0000000 and 1111111. In" in read(root)


def test_a_new_row_makes_page_and_figures_stale(root):
    rows = [*ROWS, ssd_row("persistent", **compared(2.0))]
    write_bench(root, rows)
    newer = [*rows, ssd_row("persistent", mode="bwd", **compared(3.0))]
    assert not write_bench(root, newer, check=True)
    assert figure.drawn_from(root / "docs/results.svg") != figure.fingerprint(figure.points(newer))
    assert figure.drawn_from(root / "docs/speedups.svg") != figure.fingerprint(speedup_figure.points(newer))


def test_no_rows(root):
    write_bench(root, [])
    assert "No rows yet" in read(root)
    assert write_bench(root, [], check=True)


def test_markers_are_required(root):
    (root / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match=r"README\.md: expected the lines"):
        write_bench(root, ROWS)


def test_figure_points():
    points = figure.points(ROWS)
    assert points["fwd"]["8b-b4"] == {"baseline": 1090.0, "bandwidth bound": 608e6 / 4270 / 1e3, "mamba_ssm": 1140.0}
    assert list(points["fwd"]) == ["8b-b1", "8b-b4"]


def test_a_variant_has_one_colour_in_every_figure():
    for variant in ("mamba_ssm", "baseline", "fused", "persistent", "auto"):
        name, light, _ = draw.THEME[draw.colour(variant)]
        assert light == figure.COLOURS[variant], (variant, name)


def test_pages_show_the_committed_rows():
    assert readme.write_all(check=True), "run `make readme`"


def test_workloads(root):
    """Variants as they come: an option that is switched off is another table's."""
    steps = [step_row("mamba_ssm", 200.0, 50.0), step_row("fused", 160.0, 12.0, speedup=1.25),
             step_row("fused", 170.0, 20.0, options={"exp2": False})]
    drawn = root / "docs/workloads.svg"
    assert not readme.write_steps(steps, root, check=True) and not drawn.exists()
    assert not readme.write_steps(steps, root) and readme.write_steps(steps, root, check=True)
    text = read(root)
    assert "stale results" in text and "stale workloads" not in text
    line = r"\| mamba2 +\| 1\.3b +\| ssd +\| +4 \| +4096 \| bf16 +\| fused +\| +160\.0 \|.* 7\.5 \|.* 1\.25 \|"
    assert re.search(line, text) and "170" not in text
    assert "mamba2 1.3b (ssd)" in drawn.read_text() and "160 ms, 1.25x" in drawn.read_text()
    assert not readme.write_steps([*steps, step_row("persistent", 150.0, 10.0)], root, check=True)
    readme.write_steps([], root)
    assert "No rows yet: no GPU has run the sweep" in read(root)


def test_gains():
    """Of 200 ms, 50 of them SSM, 40 are gained, 38 of these by SSM kernels; what was timed alone, or loses, gains nothing."""
    theirs = step_row("mamba_ssm", 200.0, 50.0)
    (*_, line) = result_tables.tabulate_gains([theirs, step_row("baseline", 190.0, 40.0, speedup=1.05),
                               step_row("fused", 160.0, 12.0, speedup=1.25)]).splitlines()
    assert line == "| mamba2 | 1.3b | ssd | 4 | 200.0 | 25.0 % | fused | 160.0 | 7.5 % | 1.25 | 4.17 | 95 % |"
    (*_, line) = result_tables.tabulate_gains([theirs, step_row("fused", 250.0, 60.0, speedup=0.8)]).splitlines()
    assert line.endswith("| fused | 250.0 | 24.0 % | 0.80 | 0.83 |  |")
    assert result_tables.tabulate_gains([theirs, step_row("fused", 160.0, 12.0)]).startswith("No rows yet")


def test_memory(root):
    """Of two shapes; what a forward keeps is from the row of the same shape, variant, chunk size and options."""
    whole = ssd_row("fused", mode="fwd_bwd", p50_us=1400.0) | {"peak_mib": 1660.5}
    kept = ssd_row("fused", mode="fwd_train") | {"saved_mib": 512.0}
    without = whole | {"options": {"save_states": False}, "peak_mib": 1152.3}
    others = whole | {"shape": "8b-b1", "peak_mib": 99.0}, whole | {"shape": "2.7b-b4", "peak_mib": 77.0}
    assert not readme.write_memory([whole, kept, without, *others], root)
    text = read(root)
    assert "| fused | 128 | 512 | 1660 | 1390 |\n| fused, save_states=False | 128 |  | 1152 | 1390 |\n" in text
    assert "| fused | 128 |  | 99 | 1390 |" in text.partition("8b-b4")[0]
    assert "77" not in text and "stale memory" not in text and "stale blocks" in text
    readme.write_memory([], root)
    assert "No rows yet: no GPU has run forward and backward of these shapes" in read(root)


def test_blocks(root):
    """Ours, with what it is compared to."""
    ours = ssd_row("ssd", mode="bwd", p50_us=334.0, **compared(1.48)) | {"part": "conv1d"}
    assert not readme.write_blocks([ours, ours | {"variant": "causal_conv1d", "against": None}], root, check=True)
    assert not readme.write_blocks([ours], root) and readme.write_blocks([ours], root, check=True)
    text = read(root)
    assert re.search(r"\| conv1d \| 8b-b4 +\| bwd +\| +334 \|.* 14\.2 \| mamba_ssm +\| +1\.48 \| +1\.48 \|", text)
    assert "stale blocks" not in text and "stale results" in text
    readme.write_blocks([], root)
    assert "No rows yet: no GPU has run `make block`" in read(root)


def test_terminal(root, monkeypatch):
    """As printed; errors may differ in their digits from machine to machine, and no more than that."""
    said = "persistent  fp32   dA          9.2e-07    8.9e-07  1e-04  {verdict}"
    monkeypatch.setattr(terminal_page, "print_without_gpu", lambda: said.format(verdict="agrees"))
    assert not readme.write_terminal([ssd_row("persistent", **compared(2.0)), ssd_row("fused")], root)
    text = read(root, "docs/terminal.md")
    assert " 8b-b4  fwd   persistent    128     990" in text and "fused" not in text and "NVIDIA H200, bf16" in text
    assert max(map(len, text.splitlines())) <= 100
    monkeypatch.setattr(readme.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(readme.knobs.runtime, "interpret", True)
    readme.write_terminal([], root)
    rounded, changed = said.replace("dA ", "dB ").replace("9.2e-07", "3.1e-06"), said.replace("1e-04", "1e-03")
    for other, same in ((rounded, True), (changed, False)):
        monkeypatch.setattr(terminal_page, "print_without_gpu", lambda other=other: other.format(verdict="agrees"))
        assert readme.write_terminal([], root, check=True) is same


def test_libraries(root):
    """Ranges over shapes of the default's SSD and of each part; eager speed-ups, other variants and modes do not count."""
    rows = [ssd_row("auto", mode="fwd_bwd", **compared(speedup) | {"speedup": 9.0}) for speedup in (3.0, 2.0)]
    rows += [ssd_row("persistent", mode="fwd_bwd", **compared(8.0)), ssd_row("auto", **compared(7.0))]
    parts = [ssd_row("ssd", mode="fwd_bwd", **compared(1.5)) | {"part": part} for part in ("conv1d", "selective_scan")]
    assert not readme.write_libraries(rows, parts, root)
    lines = lines_of(root, "docs/drop-in.md", "| `ssd.patch")
    assert lines[0] == "| transformers | 5.0 to 5.23 | `ssd.patch_transformers()` | SSD 2.0x to 3.0x; convolution 1.5x |"
    assert lines[1].endswith("| SSD 2.0x to 3.0x; convolution 1.5x; Mamba-1's scan 1.5x |") and len(lines) == 4
    readme.write_libraries([], [], root)
    assert "no rows yet" in read(root, "docs/drop-in.md")


def test_ablation(root):
    times = {("all", None): 250.0, ("without", "exp2"): 300.0, ("none", None): 900.0, ("added", "exp2"): 800.0}
    rows = [ssd_row("fused", graph_p50_us=us) | {"bench": "ablate", "step": step, "changed": changed, "relative": us / 250}
            for (step, changed), us in times.items()]
    assert not readme.write_ablation(rows, root) and readme.write_ablation(rows, root, check=True)
    assert "8b-b4, forward, `fused`:\n\n| option |" in read(root, "docs/ablation.md")
    for line in ("| none | | | 900 | 3.60 |", "| exp2 | 300 | 1.20 | 800 | 3.20 |", "| all | 250 | 1.00 | | |"):
        assert line in read(root, "docs/ablation.md")
    rows = [row | {"changed": "save_states"} if row["changed"] else row for row in rows]
    readme.write_ablation(rows, root)
    assert "| save_states | not used |  | 800 | 3.20 |" in read(root, "docs/ablation.md")
    readme.write_ablation([row | {"mode": "bwd"} for row in rows], root)
    assert "| save_states | 300 | 1.20 | 800 | 3.20 |" in read(root, "docs/ablation.md")
    readme.write_ablation([], root)
    assert "No rows yet" in read(root, "docs/ablation.md")


def test_several_gpus(root):
    """Two in 60 ms of what one does in 100: 1.67 times, 83 %. What has not run on one GPU has nothing to be held against."""
    run = {"workload": "mamba2", "preset": "370m", "variant": "fused", "batch": 8, "seed": 0}
    one = {**ENVIRONMENT, "run": run, "variant": "fused", "gpus": 1, "way": None, "p50_us": 1e5, "loss": 6.0}
    two = one | {"gpus": 2, "way": "ddp", "link_gbps": 300.0, "p50_us": 6e4, "loss": 6.01}
    other = two | {"run": run | {"preset": "1.3b"}}
    assert not readme.write_trainings([one | {"p50_us": 9e9}, one, two, other], root)
    (line,) = lines_of(root, "docs/workloads.md", "ddp")
    assert line == "| mamba2 | 370m | fused | 8 | 2 NVIDIA H200 | ddp | 300 | 60.0 | 100.0 | 1.67 | 83 % | 6.010 | 6.000 |"
    readme.write_trainings([other], root)
    assert "No rows yet: no GPUs have run" in read(root, "docs/workloads.md")


def test_several_seeds(root):
    """The last losses of each seed that two variants trained from; one seed alone says nothing of seeds."""

    def trained(seed: int, variant: str, loss: float, preset: str = "T") -> dict:
        run = {"workload": "mambavision", "preset": preset, "mixer": "mamba1", "steps": 200, "seed": seed, "variant": variant}
        return {**ENVIRONMENT, "run": run, "variant": variant, "gpus": 1, "way": None, "loss": loss}

    rows = [trained(0, "auto", 9.0), trained(0, "mamba_ssm", 3.3), trained(0, "auto", 3.333), trained(1, "auto", 3.6),
            trained(1, "mamba_ssm", 3.6), trained(2, "auto", 3.5), trained(0, "auto", 3.0, "B"),
            trained(0, "mamba_ssm", 3.0, "B")]
    readme.write_trainings(rows, root)
    assert lines_of(root, "docs/workloads.md", "mambavision") == [
        "| mambavision | T | mamba1 | 200 | 0 | auto 3.333, mamba_ssm 3.300 | 1.00 % |",
        "| mambavision | T | mamba1 | 200 | 1 | auto 3.600, mamba_ssm 3.600 | 0.00 % |"]
    readme.write_trainings(rows[:3], root)
    assert "No rows yet: no GPU has trained" in read(root, "docs/workloads.md")


def step_row(variant: str, step_ms: float, ssd_ms: float, options: dict | None = None, speedup: float | None = None) -> dict:
    run = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "batch": 4}
    return {**ENVIRONMENT, **run, "run": run | {"variant": variant}, "sitting": "2026-11-20T12:00:00+00:00", "variant": variant,
            "seqlen": 4096, "dtype": "bf16", "options": None if variant == "mamba_ssm" else options or {},
            "p50_us": 1e3 * step_ms, "ssm_us": 1e3 * ssd_ms, "share": ssd_ms / step_ms, "units_per_s": 1e5, "unit": "tokens",
            "effective_gbps": 1000.0, "peak_mib": 5e4, "loss": 5.0, "speedup": speedup}
