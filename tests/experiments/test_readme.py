import re

import pytest

from experiments import figure, readme, speedup_figure, terminal_page
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


def step_row(variant: str, step_ms: float, ssd_ms: float, options: dict | None = None, speedup: float | None = None) -> dict:
    run = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "batch": 4}
    return {**ENVIRONMENT, **run, "run": run | {"variant": variant}, "sitting": "2026-11-20T12:00:00+00:00", "variant": variant,
            "seqlen": 4096, "dtype": "bf16", "options": None if variant == "mamba_ssm" else options or {},
            "p50_us": 1e3 * step_ms, "ssm_us": 1e3 * ssd_ms, "share": ssd_ms / step_ms, "units_per_s": 1e5, "unit": "tokens",
            "effective_gbps": 1000.0, "peak_mib": 5e4, "loss": 5.0, "speedup": speedup}
