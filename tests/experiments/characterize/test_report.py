"""The report: well-formed, self-contained, honest about what there are no rows of, and whole in a browser."""

import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.characterize import operators
from experiments.characterize.report import build, draw, page, steps
from experiments.characterize.report.parts import NOT_YET, Section, Table
from tests.experiments.characterize.counted import STEP, kernel_row
from tests.experiments.rows import ssd_row, write

COMMITTED = Path(__file__).parents[3] / "docs" / "characterisation"
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


def test_steps_by_phase(tmp_path):
    """SSM has 8 of the forward's 20 per cent and 12 of the backward's 48; 2 are between phases."""
    shares = {("forward", "ssm"): 0.08, ("forward", "gemm"): 0.12, ("backward", "ssm"): 0.12, ("backward", "gemm"): 0.36,
              ("optimizer", "optimizer"): 0.05, ("", "optimizer"): 0.02, ("", "idle"): 0.25}
    write(tmp_path, *(STEP | {"bench": "characterize", "phase": phase, "operator": kind, "share": share, "us": 1.0, "steps": 3}
                      for (phase, kind), share in shares.items()))
    table = steps.section(tmp_path).parts[-1]
    assert table.header == ("run", "forward", "backward", "optimizer", "idle", "rest", "SSM of forward", "SSM of backward")
    assert table.rows == [(NAME, "20.0", "48.0", "5.0", "25.0", "2.0", "40.0", "25.0")]


def test_marks_and_characters_of_text():
    section = Section("a < b", ("**bold** `x<y>` & more, [2] [a & b](https://c.d/e)", Table(("k",), [("<td>",)])))
    text = page.html([section], [])
    for written in ("<h2>a &lt; b</h2>", "<strong>bold</strong> <code>x&lt;y&gt;</code> &amp; more", "&lt;td&gt;",
                    '[2] <a href="https://c.d/e">a &amp; b</a>'):
        assert written in text


def test_the_committed_report_is_of_the_committed_rows(report):
    """`make report` writes it. Charts are compared by their data: another matplotlib draws otherwise."""
    of_text = [path for path in sorted(report.iterdir()) if path.suffix in (".md", ".csv")]
    assert len(of_text) > 1
    for path in of_text:
        assert path.read_text() == (COMMITTED / path.name).read_text(), f"{path.name}: run `make report`"
    written, committed = ({path.name for path in folder.iterdir()} for folder in (report, COMMITTED))
    assert written - {"index.html"} == committed - {"index.html"}, "git ignores the page"


def test_command(tmp_path):
    write(tmp_path / "rows", ssd_row())
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "rows"), "--folder", str(tmp_path / "to")])
    assert result.exit_code == 0 and (tmp_path / "to" / "index.html").exists() and "index.html and 1 files" in result.stdout
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "none")])
    assert (result.exit_code, result.stderr) == (2, f"error: --out: got {tmp_path / 'none'}, expected a folder that exists\n")
