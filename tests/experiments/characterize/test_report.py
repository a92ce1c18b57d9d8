"""The report: well-formed, self-contained, honest about what there are no rows of, and whole in a browser."""

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import record
from experiments.__main__ import app
from experiments.characterize import definitions, operators, projection
from experiments.characterize.gpus import GPUS
from experiments.characterize.report import bandwidth, build, draw, kernels, page, projected, roofline, scaling, steps
from experiments.characterize.report.parts import NOT_YET, Figure, Section, Table
from ssd import cost
from tests.experiments.characterize.counted import STEP, kernel_row
from tests.experiments.rows import ENVIRONMENT, ssd_row, write

COMMITTED = Path(__file__).parents[3] / "docs" / "characterisation"

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LINKS = ("href", "src", "xlink:href", "action", "poster", "srcset", "data")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """From the committed rows."""
    folder = tmp_path_factory.mktemp("report")
    build.write(folder)
    return folder


class Reader(HTMLParser):
    """Open and closed tags, links and ids."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.wrong, self.links, self.ids = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in LINKS]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_page_is_well_formed_and_loads_nothing(report):
    text = (report / "index.html").read_text()
    read = Reader(text)
    assert not read.open and not read.wrong
    assert len(read.ids) == len(set(read.ids))
    papers = {"https://arxiv.org/abs/2508.17679", "https://arxiv.org/abs/2511.22849"}
    assert {link for link in read.links if link[:5] != "data:" and link[0] != "#"} == papers, "no external reference but these"
    assert all(text.count(f'"{paper}"') == text.count(f'<a href="{paper}"') == 1 for paper in papers), "which load nothing"
    assert {link[1:] for link in read.links if link.startswith("#")} <= {*read.ids}
    assert not re.search(r"url\((?!#)|@import|<script|https?://(?!www\.w3\.org|arxiv\.org/abs/)", text)


def test_every_figure_has_its_data_and_a_sentence(report):
    markdown = (report / "report.md").read_text()
    images = sorted(path.stem for path in report.glob("*.svg"))
    assert images == sorted(path.stem for path in report.glob("*.csv")) and len(images) >= 6
    for name in images:
        (see,) = re.findall(rf"!\[([^]]*)\]\({name}\.svg\)", markdown)
        assert see.endswith(".") and len(see) > 40
        assert len(list(csv.DictReader((report / f"{name}.csv").open()))) >= 2
        svg = (report / f"{name}.svg").read_text()
        assert "var(--" not in svg and ElementTree.fromstring(svg).findall(".//{*}text"), "text as text, in colours of its own"


def test_every_number_of_the_paper_has_its_row(report):
    markdown = (report / "report.md").read_text()
    table = markdown[markdown.index("| what | paper | ours"):markdown.index("## What a training step")]
    for number in ("60 %", "62 %", "14 %", "20 %", "30 %", "57.5 %", "2.40 %", "8.55 %", "89.03 %", "1.26 %", "6.86 %",
                   "91.87 %", "16", "512", "133.8", "989", "494", "3350", "132", "50 MB", "256 KB", "80 GB", "7.1 %", "43 %",
                   "1.14", "11.50 %", "16384"):
        assert number in table, number


def test_without_rows_every_section_says_so(tmp_path):
    found = build.sections(tmp_path)
    assert not [figure for section in found for figure in section.figures]
    for section in found:
        texts = [part for part in section.parts if isinstance(part, str)]
        texts += [cell for part in section.parts if isinstance(part, Table) for row in part.rows for cell in row]
        assert any(NOT_YET in text for text in texts), section.title
    assert Reader(page.html(found, ["nothing"])).wrong == []


def test_findings_are_sentences_with_a_number(report):
    text = (report / "report.md").read_text()
    opening = text[text.index("## "):text.index("## Paper / ours")]
    found = re.findall(r"^\*\*\d\.\*\* .*", opening, re.M)
    assert opening.startswith("## Five findings") and len(found) == 5
    assert all(re.search(r"\d", line[6:]) and NOT_YET not in line for line in found)


def test_findings_follow_the_counters(tmp_path):
    """Half of the baseline's bytes in lives that are three times as long."""
    units = {"block_cycles": 1000.0, "blocks": 10.0, "tensor_pct": 1.0, "issue_pct": 40.0, "shared_pct": 1.0}
    write(tmp_path, kernel_row(**units), kernel_row("scan_kernel", "fused", **units),
          kernel_row("scan_kernel", "persistent", **units | {"dram_bytes": 24e6, "block_cycles": 3000.0, "issue_pct": 90.0}))
    found = build.sections(tmp_path)[0].parts
    assert NOT_YET in found[0] and "moves 2.0 times fewer bytes than the baseline's (48 MB; `fused` 48 MB" in found[1]
    assert "live 3 times as long as the baseline's and do not raise the bandwidth: from 50 to 25 %" in found[2]
    assert "is issue slots, at 90 %. That unit is near its limit." in found[3] and NOT_YET in found[4]


def test_titles_of_bars_take_lines():
    assert draw.place_lines([("a", "x"), ("a", "y"), ("b", "x")]) == [1, 2, 4]


NAME = "mamba2 1.3b ssd fused, bf16, batch 4, documents joined"


def test_steps_of_workloads(tmp_path):
    def row(operator, share, **other):
        return {**STEP, "bench": "characterize", "steps": 3, "phase": "forward", "operator": operator, "us": 1000 * share,
                "share": share} | other

    write(tmp_path, row("gemm", 0.9, time="2025-01-01T00:00:00+00:00"), row("gemm", 1.0, gpu="NVIDIA H100"),
          row("gemm", 0.4), row("gemm", 0.15, phase="backward"),
          row("ssm", 0.25), row("other", 0.01), row("idle", 0.19))
    figure = next(section for section in build.sections(tmp_path) if section.figures).figures[0]
    assert figure.name == "operators" and figure.data == [
        {"run": NAME, "gemm": 55.0, "ssm": 25.0, "other": 1.0, "idle": 19.0}], "the last run's"
    assert [*figure.data[0]] == ["run", "idle", "gemm", "ssm", "other"]
    assert "at most 55 % of a step" in figure.see and "at most 1.0 % is of no known class" in figure.see
    text = page.markdown(build.sections(tmp_path), [])
    assert f"55 % ({NAME})" in text and "In all of these runs the GPU is idle for at most 19 % of a step." in text
    bars = [one.text for one in ElementTree.fromstring(draw.standalone(figure.svg)).iter("{http://www.w3.org/2000/svg}text")]
    assert bars[-4:] == ["GEMM", "SSM", "other kernels", "idle"] and figure.svg.count("<pattern") == 1, "one is hatched"
    assert sorted(kind for of_bar in steps.BARS.values() for kind in of_bar) == sorted((*operators.CLASSES, "idle"))


def test_steps_in_order_and_what_waits_for_the_host(tmp_path):
    runs = [("mamba2", "1.3b", "ssd", "auto", 0.02), ("mamba2", "1.3b", "ssd", "persistent", 0.03),
            ("mambavision", "T", "mamba1", "auto", 0.5), ("mamba2", "1.3b", "ssd", "baseline", 0.04),
            ("hybrid", "2b", "ssd", "fused", 0.05), ("mambavision", "T", "ssd", "fused", 0.7),
            ("mamba2", "1.3b", "ssd", "mamba_ssm", 0.01)]
    write(tmp_path, *(STEP | {"bench": "characterize", "workload": workload, "preset": preset, "mixer": mixer,
                              "variant": variant, "operator": operator, "share": share, "phase": "", "us": 1.0, "steps": 3}
                      for workload, preset, mixer, variant, idle in runs
                      for operator, share in (("gemm", 1 - idle), ("idle", idle))))
    _, said, table, *_ = steps.section(tmp_path).parts
    assert [row[0].partition(",")[0] for row in table.rows] == [
        "hybrid 2b ssd fused", "mamba2 1.3b ssd mamba_ssm", "mamba2 1.3b ssd baseline", "mamba2 1.3b ssd persistent",
        "mamba2 1.3b ssd auto", "mambavision T mamba1 auto", "mambavision T ssd fused"]
    assert table.header == ("run", "idle", "gemm") and table.rows[0][1:] == ("5.0", "95.0")
    assert said.startswith("The GPU is idle for 50 to 70 % of a step of mambavision: there the host binds")
    assert said.endswith("In other workloads the GPU is idle for at most 5 % of a step. With mamba_ssm inside, steps of hybrid "
                         "and mambavision were not profiled.")


def test_steps_by_phase(tmp_path):
    """SSM has 8 of the forward's 20 per cent and 12 of the backward's 48; 2 are between phases."""
    shares = {("forward", "ssm"): 0.08, ("forward", "gemm"): 0.12, ("backward", "ssm"): 0.12, ("backward", "gemm"): 0.36,
              ("optimizer", "optimizer"): 0.05, ("", "optimizer"): 0.02, ("", "idle"): 0.25}
    write(tmp_path, *(STEP | {"bench": "characterize", "phase": phase, "operator": kind, "share": share, "us": 1.0, "steps": 3}
                      for (phase, kind), share in shares.items()))
    table = steps.section(tmp_path).parts[-1]
    assert table.header == ("run", "forward", "backward", "optimizer", "idle", "rest", "SSM of forward", "SSM of backward")
    assert table.rows == [(NAME, "20.0", "48.0", "5.0", "25.0", "2.0", "40.0", "25.0")]


def test_models_by_counters(tmp_path):
    """Two kernels of 100 tensor FLOPs, 10 additions and 20 fused multiply-adds each, at 300 bytes: 300 FLOPs, 600 bytes."""
    row = {**STEP, "bench": "step_counters", "dram_bytes": 300.0, "ncu_us": 1.0, "tensor_flops": 100.0, "fadds": 10.0,
           "fmuls": 0.0, "ffmas": 20.0}
    write(tmp_path, row | {"kernel": "a"}, row | {"kernel": "b"})
    table = roofline.models(tmp_path)
    assert table.rows == [(NAME, "0.5", "0.0", "0")]
    write(tmp_path, {key: value for key, value in row.items() if key != "ffmas"} | {"kernel": "c"})
    assert roofline.models(tmp_path).rows == [(NAME, "-", "-", "0")], "FLOPs of one are not known"


def test_scans_by_counters(tmp_path):
    """100 additions at 50 bytes in two kernels; an older count of the same call is left out."""
    row = {**ENVIRONMENT, "bench": "block_counters", "part": "selective_scan", "shape": "mamba-1.4b", "mode": "fwd",
           "variant": "ssd", "kernel": "a", "dram_bytes": 25.0, "ncu_us": 1.0, "tensor_flops": 0.0, "fadds": 50.0,
           "fmuls": 0.0, "ffmas": 0.0}
    write(tmp_path, row | {"time": "2000", "dram_bytes": 1e9}, row, row | {"kernel": "b"}, row | {"part": "conv1d"})
    assert roofline.scans(tmp_path).rows == [("mamba-1.4b", "forward", "ssd", "2.0", "0.0", "0")]


def test_claims_follow_the_counters(tmp_path):
    units = {"block_cycles": 1000.0, "blocks": 10.0, "tensor_pct": 1.0, "issue_pct": 40.0, "shared_pct": 1.0}
    slow = units | {"dram_bytes": 1e6, "dram_pct": 1.0}
    write(tmp_path, kernel_row(**units), kernel_row("scan_kernel", "fused", **units | {"dram_bytes": 49e6}),
          kernel_row("scan_kernel", "persistent", **slow | {"issue_pct": 90.0}))
    text = page.markdown(build.sections(tmp_path), [])
    assert "round trip through L2: refuted as far as DRAM shows it.** DRAM traffic of the forward goes from 48 MB" in text
    assert "(baseline) to 49 MB (`fused`). What goes through L2 itself was not counted; its hit rate, cold: from 60 to" in text
    assert "refuted by W, refuted by U.**" in text and "vector compute binds: confirmed.**" in text
    assert "by ncu: issue slots 90 %, DRAM 1 %, tensor cores 1 %, shared memory 1 %. Above 80 %, near" in text
    assert "near the limit: issue slots; vector instructions go through issue slots." in text


def test_vector_compute_does_not_bind_where_nothing_is_busy(tmp_path):
    """66.9e6 fused multiply-adds in 20 us are a tenth of the H200's 66.9 TFLOP/s."""
    units = {"tensor_pct": 1.0, "issue_pct": 40.0, "shared_pct": 1.0, "fadds": 0.0, "fmuls": 0.0, "ffmas": 66.9e6,
             "tensor_flops": 0.0}
    names = ("baseline", "fused", "persistent")
    write(tmp_path, *(kernel_row("scan_kernel", name, **units) for name in names))
    text = page.markdown(build.sections(tmp_path), [])
    assert "vector compute binds: not confirmed.** " in text and "No unit is near its limit" in text
    assert "0.1 G vector FLOPs are 10.0 % of what" in text
    assert "W goes from 50.0 to 50.0 % of the data sheet's peak" in text
    write(tmp_path, kernel_row("scan_kernel", "persistent", **units | {"dram_pct": 90.0}, time="2100"))
    text = page.markdown(build.sections(tmp_path), [])
    assert "binds: not confirmed.** " in text and "Above 80 %, near the limit: DRAM. " in text


def test_where_the_ratios_flops_are_from(tmp_path):
    """900 over 60 lies between 14.8, the data sheet's, and 16; the other has no FLOPs but the cost model's."""
    counted = {"tensor_flops": 900.0, "fadds": 60.0, "fmuls": 0.0, "ffmas": 0.0}
    write(tmp_path, kernel_row(**counted))
    text = page.markdown(build.sections(tmp_path), [])
    assert "All of these FLOPs were counted by ncu." in text and "kernels are the cost model's" not in text
    assert "data sheet the ratio is 14.8, since" in text and "1 kernel lies between the two." in text
    assert "1 of 1; the lowest 15 |" in text
    write(tmp_path, kernel_row("chunk_state_kernel", time="2100"), kernel_row(**counted, time="2100"))
    text = page.markdown(build.sections(tmp_path), [])
    assert "The FLOPs of 1 of these 2 kernels are the cost model's, the others' were counted by ncu." in text


def test_ratios_of_every_variant(tmp_path):
    """100 over 10 is below 16; a kernel of another variant that was not counted has none, whatever the cost model says."""
    counted = {"fadds": 10.0, "fmuls": 0.0, "ffmas": 0.0}
    write(tmp_path, kernel_row("hopper_scan_kernel", "fused", **counted, tensor_flops=900.0),
          kernel_row("chunk_state_kernel", "fused"), kernel_row(**counted, tensor_flops=100.0))
    figure = kernels.ratios(definitions.calls(tmp_path)).figures[0]
    assert [(line["variant"], line["ratio"]) for line in figure.data] == [("baseline", 10.0), ("fused", 90.0)]
    assert "chunk_scan (forward)<" in figure.svg and "hopper_scan<" in figure.svg and "(forward, fused)<" in figure.svg
    assert figure.see == ("Tensor FLOPs for one vector FLOP. The baseline: 1 of 1 kernels that do both is below 16; the lowest "
                          "is chunk_scan with 10. Other variants: none of 1 kernels that do both is below 16; the lowest is "
                          "hopper_scan with 90.")


def test_times_of_another_run(tmp_path):
    """Two kernels of a call tell of two peaks, unless a per cent is too small to tell; one peak may be any."""
    write(tmp_path, kernel_row(dram_pct=25.0), kernel_row("b_kernel", dram_pct=25.0), kernel_row("c_kernel", dram_pct=0.01),
          kernel_row("a_kernel", "fused"), kernel_row("b_kernel", "fused", ncu_us=19.0))
    (note, *_) = bandwidth.section(definitions.calls(tmp_path)).parts
    assert "Of fused fwd ncu's times are not those of the run that read the bytes" in note


def test_more_than_every_hit_is_no_rate(tmp_path):
    write(tmp_path, kernel_row(l2_warm_hit_pct=70.0), kernel_row("sum_parts_kernel", l2_warm_hit_pct=167.1),
          kernel_row("odd_kernel", l2_hit_pct=100.1, l2_warm_hit_pct=100.0))
    note, figure = kernels.caches(definitions.calls(tmp_path)).parts
    rates = [(line["l2_hit_pct"], line["l2_warm_hit_pct"]) for line in figure.data]
    assert rates == [(60.0, 70.0), (60.0, None), (None, 100.0)]
    assert note.endswith("Left out, since ncu gives more than 100 %: L2, warm of sum_parts (baseline, forward); L2 of odd "
                         "(baseline, forward).")
    assert "Warm, L2 hits at most 10 points more often." in figure.see


def test_what_warps_wait_for(tmp_path):
    write(tmp_path, kernel_row())
    said, table = kernels.registers(definitions.calls(tmp_path))
    assert said == f"What warps wait for: {NOT_YET}." and table.rows[0][3:5] == ("-", "-")
    write(tmp_path, kernel_row("odd_kernel", time="2100", stall_barrier=2.0, stall_long_scoreboard=2.52, stall_wait=0.3),
          kernel_row("scan_kernel", time="2100", stall_barrier=0.1, stall_wait=0.9),
          kernel_row("scan_kernel", "fused", time="2100", stall_wait=0.9))
    said, table = kernels.registers(definitions.calls(tmp_path))
    assert {row[2:5] for row in table.rows} == {("odd", "global memory (long scoreboard)", "2.5"),
                                                ("scan", "a fixed latency (wait)", "0.9")}
    assert said.endswith("2 of 3 kernels wait most for a fixed latency (wait).")


def test_growth_is_of_one_variant_and_mode(tmp_path):
    """16 times the tokens: the forward's memory is 3 times as much, the backward's 5 times; fused lacks the short sequence."""
    def row(mode, seqlen, peak_mib, variant="baseline", us=10.0):
        return ssd_row(variant, mode=mode) | {"shape": f"sweep-{seqlen}", "seqlen": seqlen, "peak_mib": peak_mib,
                                               "graph_p50_us": us}

    write(tmp_path, row("fwd", 64, 1.0), row("bwd", 64, 8.0), row("fwd", 1024, 3.0), row("bwd", 1024, 40.0, us=40.0),
          row("fwd", 1024, 900.0, "fused"))
    time, memory = scaling.section(tmp_path).figures
    assert time.see.startswith("For 16 times the tokens the time grows less: baseline forward 1 times, baseline backward 4 "
                               "times. ")
    assert memory.see == ("For 16 times the tokens, memory beyond the inputs grows: baseline forward 3 times, baseline "
                          "backward 5 times.")


def test_coefficients_of_terms_alike_are_not_to_be_read():
    rng = np.random.default_rng(0)
    apart = [projection.Sample("k", "s", "fwd", 128, 10.0, launches, cost.Cost(*(1e6 * rng.lognormal(size=4))))
             for launches in range(40)]
    alike = [replace(one, work=replace(one.work, vector=4 * one.work.exps)) for one in apart]
    assert projected.alike(alike, GPUS["h200"]) == ["vector", "exponentials"]
    assert projected.alike(apart, GPUS["h200"]) == []


def test_claims_without_what_an_ncu_did_not_know(tmp_path):
    rows = [kernel_row(variant=name) for name in ("baseline", "fused", "persistent")]
    write(tmp_path, *({key: value for key, value in row.items() if key not in ("l2_hit_pct", "block_cycles")} for row in rows))
    text = page.markdown(build.sections(tmp_path), [])
    assert "its hit rate, cold: not measured yet." in text
    assert "A block lives how much longer: not measured yet. From" in text
    assert "vector compute binds: not measured yet.**" in text


def test_marks_and_characters_of_text():
    section = Section("a < b", ("**bold** `x<y>` & more, [2] [a & b](https://c.d/e)", Table(("k",), [("<td>",)])))
    text = page.html([section], [])
    for written in ("<h2>a &lt; b</h2>", "<strong>bold</strong> <code>x&lt;y&gt;</code> &amp; more", "&lt;td&gt;",
                    '[2] <a href="https://c.d/e">a &amp; b</a>'):
        assert written in text


def test_figures_do_not_share_ids():
    svg = draw.chart(lambda ax: ax.plot([1, 2], [1, 2], "o-"), 2.0)
    figures = tuple(Figure(name, svg, "See.", [{"a": 1}]) for name in ("one", "two"))
    read = Reader(page.html([Section("s", figures)], []))
    assert len(read.ids) == len(set(read.ids)) and {link[1:] for link in read.links if link.startswith("#")} <= {*read.ids}


def test_the_committed_report_is_of_the_committed_rows(tmp_path):
    """`make report` writes it. Charts are compared by their data: another matplotlib draws otherwise."""
    build.write(tmp_path, record.RESULTS)
    of_text = [path for path in sorted(tmp_path.iterdir()) if path.suffix in (".md", ".csv")]
    assert len(of_text) > 1
    for path in of_text:
        assert path.read_text() == (COMMITTED / path.name).read_text(), f"{path.name}: run `make report`"
    written, committed = ({path.name for path in folder.iterdir()} for folder in (tmp_path, COMMITTED))
    assert written - {"index.html"} == committed - {"index.html"}, "git ignores the page"


def test_command(tmp_path):
    write(tmp_path / "rows", ssd_row())
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "rows"), "--folder", str(tmp_path / "to")])
    assert result.exit_code == 0 and (tmp_path / "to" / "index.html").exists() and "index.html and 1 files" in result.stdout
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "none")])
    assert (result.exit_code, result.stderr) == (2, f"error: --out: got {tmp_path / 'none'}, expected a folder that exists\n")


PROBE = """<script>addEventListener("load", () => {
  const out = [], past = (box, edge) => box.right > edge.right + 1 || box.left < edge.left - 1;
  const page = {left: 0, right: document.documentElement.clientWidth};
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect(), figure = one.closest("svg");
    const frame = one.parentElement.closest(".scroll"), scrolls = frame && getComputedStyle(frame).overflowX === "auto";
    if (!scrolls && !one.closest("svg *") && past(box, page)) out.push(one.tagName);
    if (one.tagName === "text" && past(box, figure.getBoundingClientRect())) out.push(one.textContent);
  }
  parent.document.title = "found " + page.right + ": " + out.join("; ");
});</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", (360, 1280))
def test_nothing_is_cut_off_in_a_browser(report, tmp_path, width):
    """The page measures itself in a frame, windows being no narrower than 500: what passes its edges, or a figure's."""
    content = escape((report / "index.html").read_text().replace("</body>", PROBE))
    outer = tmp_path / "outer.html"
    outer.write_text(f'<!DOCTYPE html><title></title><iframe width="{width}" style="border: 0" srcdoc="{content}">')
    ran = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000",
         "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, timeout=60)
    assert f"<title>found {width}: </title>" in ran.stdout, re.findall("<title>.*?</title>", ran.stdout)
    assert "CONSOLE" not in ran.stderr
