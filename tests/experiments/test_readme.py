"""What documents show of rows: tables, the pages that they are written into, figures that know what they were drawn from."""

import re

import pytest

from experiments import figure, readme, result_tables, speedup_figure, step_figure, terminal_page, training_tables
from experiments.readme import Shown, list_sections, write
from tests.experiments import rows as rows_of
from tests.experiments.rows import ENVIRONMENT, compare, ssd_row

ROWS = [
    ssd_row(mode="fwd", p50_us=1100.0, **compare(1.05)), ssd_row(mode="bwd", p50_us=4400.0, **compare(0.91)),
    ssd_row(shape="8b-b1", p50_us=300.0, **compare(1.0)), ssd_row("mamba_ssm", mode="fwd", p50_us=1150.0),
    ssd_row("mamba_ssm", mode="bwd", p50_us=4000.0)]
PRINTED = "persistent  fp32   dA          9.2e-07    8.9e-07  1e-04  agrees"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A tree of the pages that are written, with nothing but markers."""
    (tmp_path / "docs").mkdir()
    for page, section in [*list_sections(Shown()), (readme.TERMINAL, "terminal-cpu")]:
        with (tmp_path / page).open("a") as file:
            file.write(f"before\n<!-- {section}: written by `make readme` -->\nstale {section}\n<!-- end of {section} -->\n")
    monkeypatch.setattr(terminal_page, "print_without_gpu", lambda: PRINTED)
    monkeypatch.setattr(readme.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(readme.knobs.runtime, "interpret", True)
    return tmp_path


def read(root):
    return {path: path.read_text() for path in sorted(root.rglob("*.*"))}


def lines_of(text):
    """The cells of each line of the tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_check_finds_what_is_stale_and_changes_nothing(root):
    before, shown = read(root), Shown(ROWS)
    assert not write(shown, root, check=True) and read(root) == before
    assert not write(shown, root)
    after = read(root)
    assert "stale" not in "".join(after.values()) and all(text.startswith(("before\n", "<?xml")) for text in after.values())
    assert write(shown, root, check=True)
    newer = [*ROWS, ssd_row("persistent", mode="bwd", **compare(3.0))]
    assert not write(Shown(newer), root, check=True) and read(root) == after
    for path, drawing in (("docs/results.svg", figure), ("docs/speedups.svg", speedup_figure)):
        old, new = (figure.compute_fingerprint(drawing.points(rows)) for rows in (ROWS, newer))
        assert figure.read_fingerprint(root / path) == old != new


def test_without_rows_every_section_says_so(root):
    assert not write(Shown(), root) and write(Shown(), root, check=True)
    for (page, section), text in list_sections(Shown()).items():
        assert section == "terminal-gpu" or "o GPU" in text or "no rows yet" in text, page


def test_markers_are_required(root):
    """On every page, before one is written."""
    (root / "docs" / "workloads.md").write_text("no markers")
    before = read(root)
    with pytest.raises(ValueError, match=r"workloads\.md: expected the lines"):
        write(Shown(ROWS), root)
    assert read(root) == before


def test_pages_show_the_committed_rows():
    assert write(Shown.read(), check=True), "run `make readme`"


def test_what_is_shown(tmp_path):
    """Variants as they come, on a GPU: an option that is switched off, and a sweep over lengths, are other documents'."""
    off, default = ssd_row("fused", options={"exp2": False}), ssd_row("fused", options={})
    step = {"bench": "step", "workload": "mamba2", "preset": "1.3b", "run": {"mixer": "ssd", "documents": True}, "sitting": "",
            "ssm_us": None, "unit": "tokens", "units_per_s": 1.0}
    counted = dict.fromkeys(("workload", "preset", "variant", "batch", "seqlen", "dtype", "accumulate",
                             "checkpoint_activations", "compile"))
    steps = [{key: value for key, value in row.items() if key not in ("err_seqlen",)} | step | {"run": step["run"] | counted}
             for row in (off, default)]
    rows_of.write(tmp_path, off, default, ssd_row("fused", gpu=None), ssd_row(shape="sweep-64"), *steps)
    shown = Shown.read(tmp_path)
    assert [(row["shape"], row["options"], row["gpu"]) for row in shown.bench] == [("8b-b4", {}, "NVIDIA H200")]
    assert len(shown.memory) == 3 and [row["options"] for row in shown.steps] == [{}]


def test_results_have_losses_too():
    lines = lines_of(result_tables.tabulate_results(ROWS, "results.svg"))
    assert ["8b-b4", "4390 (0.91)", "3990"] in lines
    ours, rival = ssd_row("persistent", mode="fwd_bwd", p50_us=900.0, **compare(1.5)), ssd_row("mamba_ssm", mode="fwd_bwd")
    wrong = ssd_row("mamba_ssm", err_rms=1.0)
    text = result_tables.tabulate_results([*ROWS, ours, rival, wrong], "results.svg")
    assert ["8b-b4", "900 (1.50)", "1000"] in lines_of(text.partition("eager**")[2])
    assert "at most 2.1e-03 in a forward and 2.1e-03 in a backward" in text, "ours alone"


def test_models_have_a_table_of_their_own():
    rows = [ssd_row(variant, shape=shape, **compare(gain) if gain else {}) for variant, shape, gain in (
        ("persistent", "falcon-h1-7b", 0.5), ("auto", "falcon-h1-7b-32k", None), ("mamba_ssm", "falcon-h1-7b", None))]
    text = result_tables.tabulate_models([*rows, *ROWS])
    _, _, short, _, _, long = lines_of(text)
    assert short[:5] == ["falcon-h1-7b", "128 x 256", "24 / 1", "990", "990 (0.50)"] and long[:5] == [*short[:3], "", ""]
    assert long[5] == "990" and "batch 2 of 4096 tokens" in text and "batch 1 of 32768 tokens" in text
    results = result_tables.tabulate_results(rows, "results.svg")
    assert "**Forward**" not in results and "falcon-h1-7b" not in results


def test_speedups():
    """Ranges are of the fastest variant at each shape, by its time in a graph; lines are `persistent`'s alone."""
    rows = [*ROWS, ssd_row("fused", **compare(2.5)), ssd_row("persistent", shape="8b-b1", **compare(3.25) | {"speedup": 9.0}),
            ssd_row("fused", mode="fwd_bwd", **compare(1.75)), ssd_row("fused", shape="8b-b8"),
            ssd_row("persistent", p50_us=252.0, **compare(2.0)), ssd_row("persistent", mode="bwd", **compare(0.75))]

    def render(*more):
        return " ".join(result_tables.tabulate_speedups([*rows, *more], []).split())

    assert "on one NVIDIA H200" in render() and "the default" not in render()
    assert "Over 8b-b4, forward and backward together are 1.8x as fast with the fastest variant. " in render()
    assert "The figure's bars and the table show `persistent`" in render()
    assert "| Mamba-2 8B, 4 x 4096 | **2.0x** 242 | **0.8x** 990 | - |" in render()
    assert "a dash: not measured" in render()
    slow, fast = (ssd_row("auto", mode="fwd_bwd", shape=shape, **compare(gain)) for shape, gain in
                  (("8b-b4", 1.5), ("8b-b1", 3.25)))
    assert "Over 8b-b4 and 8b-b1, " in render(slow, fast) and "are 1.8x to 3.2x as fast" in render(slow, fast)
    assert "fastest variant, and 1.5x to 3.2x with the default, `auto`." in render(slow, fast)
    two = render(ssd_row("persistent", **compare(9.0)) | {"gpu": "NVIDIA H100"})
    assert two.count(" on one NVIDIA H") == 2 and "**9.0x**" not in two and "**2.0x**" in two, "one table"
    forward = ssd_row("persistent", shape="nemotron-nano-9b-v2", **compare(3.0)) | {"gpu": "NVIDIA H100"}
    shown, table, other = (render(forward).index(part) for part in ("on one NVIDIA H200", "| Mamba-2 8B", "on one NVIDIA H100"))
    assert shown < table < other, "the GPU of the figure and the table first"
    assert "Only forwards were compared there. With `persistent`: nemotron-nano-9b-v2 3.0x." in render(forward)


def test_workloads(root):
    """Every variant has its line, its bar and its speed-up."""
    steps = [step_row("mamba_ssm", 200.0, 50.0), step_row("fused", 160.0, 12.0, speedup=1.25)]
    header, _, _, line, parts, _, _, parts_of = lines_of(training_tables.tabulate_steps(steps, "workloads.svg"))
    found = dict(zip(header, line, strict=True)) | dict(zip(parts, parts_of, strict=True))
    assert [found[name] for name in ("workload", "variant", "step ms", "SSM %", "speed-up")] == [
        "mamba2 1.3b (ssd)", "fused", "160.0", "7.5", "1.25"]
    write(Shown(steps=steps), root)
    drawn = (root / "docs/workloads.svg").read_text()
    assert "mamba2 1.3b (ssd)" in drawn and "160 ms, 1.25x" in drawn
    alone = step_row("fused", 150.0, 12.0) | {"gpu": "NVIDIA H100"}
    ((what, variants),) = step_figure.points([alone, *steps[::-1]]).items()
    assert what.startswith("H200: ") and [*variants] == ["mamba_ssm", "fused"], "what has a speed-up"
    captured = [row | {"graph": True} for row in steps]
    (what,) = step_figure.points([*captured, *steps])
    assert what.endswith(", captured"), "rather than launch by launch"
    assert not step_figure.points([alone])
    tables = training_tables.tabulate_steps([alone, *steps], "workloads.svg").split("NVIDIA H")[1:]
    assert [("speed-up" in table, "SSM %" in table) for table in tables] == [
        (True, False), (False, False), (False, True), (False, True)], "no empty columns, and the last GPU by name first"
    unlike = [steps[1] | {"run": steps[1]["run"] | more} for more in ({"documents": False}, {"buckets": 8, "documents": True})]
    names = [line[0] for line in lines_of(training_tables.tabulate_steps(unlike, "workloads.svg"))[2:4]]
    assert names == ["mamba2 1.3b (ssd), filled up", "mamba2 1.3b (ssd), one document a row"]
    (line,) = lines_of(training_tables.tabulate_gains(steps))[2:]
    assert line == ["mamba2 1.3b (ssd)", "4", "200.0", "25.0", "fused", "160.0", "7.5", "1.25", "4.17", "95"]
    both = training_tables.tabulate_gains(steps + [row | {"gpu": "NVIDIA H100"} for row in steps])
    assert [part.partition(":")[0] for part in both.split("On one ")[1:]] == ["NVIDIA H200", "NVIDIA H100"]


def test_terminal(root, monkeypatch):
    """As printed; errors may differ in their digits from machine to machine, and no more than that."""
    rows = [ssd_row("persistent", **compare(2.0)), ssd_row("fused"), ssd_row("mamba_ssm"),
            ssd_row("persistent", gpu="NVIDIA L4"), ssd_row("persistent", shape="8b-b1")]
    write(Shown(rows), root)
    text = (root / readme.TERMINAL).read_text()
    assert " 8b-b4  fwd   persistent    128     990" in text and "NVIDIA H200, bf16" in text
    assert not any(other in text for other in ("fused", "L4", "8b-b1"))
    assert max(map(len, text.splitlines())) <= 100
    write(Shown(), root)
    rounded, changed = PRINTED.replace("dA ", "dB ").replace("9.2e-07", "3.1e-06"), PRINTED.replace("1e-04", "1e-03")
    for other, same in ((rounded, True), (changed, False)):
        monkeypatch.setattr(terminal_page, "print_without_gpu", lambda other=other: other)
        assert write(Shown(), root, check=True) is same


@pytest.mark.parametrize("mode, option, without", [("fwd", "exp2", ["300", "1.20"]), ("fwd", "save_states", ["not used", ""]),
                                                   ("bwd", "save_states", ["300", "1.20"])])
def test_ablation(mode, option, without):
    """An option that changes nothing of what a mode times is not said to be worth something."""
    times = {("all", None): 250.0, ("without", option): 300.0, ("none", None): 900.0, ("added", option): 800.0}
    rows = [ssd_row("fused", mode=mode, graph_p50_us=us) | {"step": step, "changed": changed, "relative": us / 250}
            for (step, changed), us in times.items()]
    assert lines_of(result_tables.tabulate_ablation(rows))[2:] == [
        ["none", "", "", "900", "3.60"], [option, *without, "800", "3.20"], ["all", "250", "1.00", "", ""]]


def test_costs():
    """Others' chunk size stands beside their peak; only what was measured on a GPU is said to be its."""
    rows = [ssd_row(name, mode="fwd_bwd", graph_p50_us=us, peak_mib=10 * us, chunk_size=size, gpu=gpu)
            for name, us, size, gpu in (
                ("mamba_ssm", 9.0, 256, "NVIDIA H100"), ("mamba_ssm", 8.0, 128, "NVIDIA H200"),
                ("persistent", 2.0, 64, "NVIDIA H100"), ("auto", 3.0, 64, "NVIDIA H100"))]
    kept = ssd_row("mamba_ssm", mode="fwd_train", chunk_size=128, saved_mib=8.0)
    head, _, theirs, *_ = lines_of(result_tables.tabulate_costs([*rows, kept]))
    assert head[1:] == ["H100: µs", "H100: peak, MiB", "H200: µs", "H200: peak, MiB", "H200: kept, MiB"]
    assert theirs == ["`mamba_ssm`", "9", "90, chunk 256", "8", "80, chunk 128", "8"]


def test_several_gpus():
    """Two in 60 ms of what one does in 100: 1.67 times, 83 %. What has not run on one GPU has nothing to be held against."""
    run = {"workload": "mamba2", "preset": "370m", "variant": "fused", "batch": 8, "steps": 40, "seed": 0}
    one = {**ENVIRONMENT, "run": run, "variant": "fused", "gpus": 1, "way": None, "p50_us": 1e5, "loss": 6.0}
    two = one | {"gpus": 2, "way": "ddp", "link_gbps": 300.0, "p50_us": 6e4, "loss": 6.01}
    other = two | {"run": run | {"preset": "1.3b"}}
    (line,) = lines_of(training_tables.tabulate_several_gpus([one | {"p50_us": 9e9}, one, two, other]))[2:]
    assert line == ["mamba2", "370m", "fused", "8", "40", "2 NVIDIA H200", "ddp", "300", "60.0", "100.0", "1.67", "83 %",
                    "6.010", "6.000"]
    assert "No rows yet" in training_tables.tabulate_several_gpus([other])
    later = [row | {"git_sha": "later", "p50_us": row["p50_us"] / 2} for row in (one, two)]
    (line,) = lines_of(training_tables.tabulate_several_gpus([one, two, *later]))[2:]
    assert line[8:10] == ["30.0", "50.0"], "of the last commit alone"
    captured = [one | {"graph": True, "p50_us": 5e4}, two | {"graph": True, "p50_us": 3e4}]
    tables = [lines_of(training_tables.tabulate_several_gpus(of))[2:] for of in ([one, two, *captured], [captured[0], two])]
    assert [[line[8:12] for line in lines] for lines in tables] == [
        [["60.0", "100.0", "1.67", "83 %"], ["30.0, captured", "50.0, captured", "1.67", "83 %"]],
        [["60.0", "50.0, captured", "0.83", "42 %"]]]


def test_a_figure_is_dark_where_its_reader_prefers_it(tmp_path):
    """Every colour that is drawn has a dark one; none is left to matplotlib, and no white box is drawn."""
    speedup_figure.draw(ROWS, tmp_path / "figure.svg")
    style, drawn = (tmp_path / "figure.svg").read_text().split("</style>", 1)
    used = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawn))
    assert used <= set(re.findall(r'"((?:fill|stroke): #[0-9a-f]{6})"', style)) and "background: #0d1117" in style


def step_row(variant: str, step_ms: float, ssd_ms: float, speedup: float | None = None) -> dict:
    run = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "batch": 4}
    return {**ENVIRONMENT, **run, "run": run | {"variant": variant}, "sitting": "2026-11-20T12:00:00+00:00", "variant": variant,
            "seqlen": 4096, "dtype": "bf16", "options": None if variant == "mamba_ssm" else {}, "p50_us": 1e3 * step_ms,
            "ssm_us": 1e3 * ssd_ms, "share": ssd_ms / step_ms, "units_per_s": 1e5, "unit": "tokens", "effective_gbps": 1000.0,
            "peak_mib": 5e4, "loss": 5.0, "speedup": speedup}
