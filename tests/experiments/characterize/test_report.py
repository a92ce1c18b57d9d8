"""The report: well-formed, self-contained, honest about what there are no rows of, and whole in a browser."""

import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments import record
from experiments.characterize import operators
from experiments.characterize.report import build, draw, page, paper, steps
from tests.experiments.invoke import invoke
from tests.experiments.rows import ENVIRONMENT, kernel_row, ssd_row, write

STEP = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "variant": "fused", "dtype": "bf16", "batch": 4,
        "run": {"documents": False}, **ENVIRONMENT}
COMMITTED = Path(__file__).parents[3] / "docs" / "characterisation"
LINKS = ("href", "src", "xlink:href", "action", "poster", "srcset", "data")
NOT_YET = "not measured yet"
NAME = "mamba2 1.3b ssd fused, bf16, batch 4, documents joined"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """From the committed rows."""
    folder = tmp_path_factory.mktemp("report")
    build.write(folder, record.read_gpus())
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


def sections_of(rows) -> dict[str, str]:
    """The report's sections by title."""
    _, *parts = re.split(r"^## (.*)\n", build.render(build.collect(rows)), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_page_is_well_formed_and_loads_nothing(report):
    text = (report / "index.html").read_text()
    read = Reader(text)
    assert not read.open and not read.wrong
    assert len(read.ids) == len(set(read.ids))
    papers = {"https://arxiv.org/abs/2508.17679", "https://arxiv.org/abs/2511.22849"}
    assert {link for link in read.links if link[:5] != "data:" and link[0] != "#"} == papers, "no external reference but these"
    assert {link[1:] for link in read.links if link.startswith("#")} <= {*read.ids}
    assert not re.search(r"url\((?!#)|@import|<script|https?://(?!www\.w3\.org|arxiv\.org/abs/)", text)
    assert text.count("<figure>") == text.count("</svg>") == len([*report.glob("*.svg")]) and "FIGURE" not in text


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


def test_every_number_of_the_paper_has_its_row():
    table = sections_of([])["Paper / ours"]
    for number in ("60 %", "62 %", "14 %", "20 %", "30 %", "57.5 %", "2.40 %", "8.55 %", "89.03 %", "1.26 %", "6.86 %",
                   "91.87 %", "16", "512", "133.8", "989", "494", "3350", "132", "50 MB", "256 KB", "80 GB", "7.1 %", "43 %",
                   "1.14", "11.50 %", "16384"):
        assert f" {number}" in table, number
    assert {line.count("|") for line in table.splitlines() if line.startswith("|")} == {5}, "as many cells in each line"


def test_without_rows_every_section_says_so():
    found = sections_of([])
    assert len(found) == 11 and "![" not in "".join(found.values())
    assert [title for title, text in found.items() if NOT_YET not in text] == []


def test_findings_follow_the_counters(tmp_path):
    """Half of the baseline's bytes in lives that are three times as long; rows of a CPU are in no report."""
    units = {"block_cycles": 1000.0, "blocks": 10.0, "tensor_pct": 1.0, "issue_pct": 40.0, "shared_pct": 1.0}
    write(tmp_path, kernel_row(**units), kernel_row("scan_kernel", "fused", **units),
          kernel_row("scan_kernel", "persistent", **units | {"dram_bytes": 24e6, "block_cycles": 3000.0, "issue_pct": 90.0}),
          ssd_row(gpu=None))
    found = sections_of(record.read_gpus(tmp_path))
    first, second, third, fourth, fifth = found["Five findings"].strip().split("\n\n")
    assert NOT_YET in first + fifth and "moves 2.0 times fewer bytes than the baseline's (48 MB; `fused` 48 MB" in second
    assert "live 3 times as long as the baseline's and do not raise the bandwidth: from 50 to 25 %" in third
    assert "is issue slots, at 90 %, near its limit." in fourth
    assert "from 3 rows" in found["Where the numbers are from"]


def test_titles_of_bars_take_lines():
    assert draw.place_lines([("a", "x"), ("a", "y"), ("b", "x")]) == [1, 2, 4]


def step_rows(shares: dict[tuple[str, str], float], **other) -> list[dict]:
    """Of (phase, operator)."""
    return [STEP | {"bench": "characterize", "phase": phase, "operator": kind, "share": share, "us": 1000 * share, "steps": 3}
            | other for (phase, kind), share in shares.items()]


def test_steps_of_workloads():
    """The last run's, on the GPU of most rows."""
    last = {("forward", "gemm"): 0.4, ("backward", "gemm"): 0.15, ("forward", "ssm"): 0.25, ("forward", "other"): 0.01,
            ("", "idle"): 0.19}
    rows = [*step_rows({("forward", "gemm"): 0.9}, time="2025-01-01T00:00:00+00:00"),
            *step_rows({("forward", "gemm"): 1.0}, gpu="NVIDIA H100"), *step_rows(last)]
    figure = steps.collect(rows)["figures"]["operators"]
    assert figure.data == [{"run": NAME, "gemm": 55.0, "ssm": 25.0, "other": 1.0, "idle": 19.0}]
    assert [*figure.data[0]] == ["run", "idle", "gemm", "ssm", "other"]
    found = sections_of(rows)
    text = found["What a training step spends its time on"]
    assert "at most 55 % of a step" in text and "at most 1.0 % is of no known class" in text
    assert f"55 % ({NAME})" in found["Paper / ours"]
    assert "In all of these runs the GPU is idle for at most 19 % of a step." in text
    bars = [one.text for one in ElementTree.fromstring(draw.make_standalone(figure.svg)).iter("{http://www.w3.org/2000/svg}text")]
    assert bars[-4:] == ["GEMM", "SSM", "other kernels", "idle"] and figure.svg.count("<pattern") == 1, "one is hatched"
    assert sorted(kind for of_bar in steps.BARS.values() for kind in of_bar) == sorted((*operators.CLASSES, "idle"))


def test_steps_by_phase():
    """SSM has 8 of the forward's 20 per cent and 12 of the backward's 48; 2 are between phases."""
    rows = step_rows({("forward", "ssm"): 0.08, ("forward", "gemm"): 0.12, ("backward", "ssm"): 0.12,
                      ("backward", "gemm"): 0.36, ("optimizer", "optimizer"): 0.05, ("", "optimizer"): 0.02,
                      ("", "idle"): 0.25})
    (values,) = steps.collect(rows)["phases"].values()
    assert values == pytest.approx([20, 48, 5, 25, 2, 40, 25])  # phases, idle, rest; SSM of the forward and of the backward
    assert f"| {NAME} | 20.0 | 48.0 | 5.0 | 25.0 | 2.0 | 40.0 | 25.0 |" in "".join(sections_of(rows).values())


def test_reasons_of_several_lines_have_a_letter():
    lines, explained = paper.share_reasons("x | 1 | own; both\ny | 2 | both\nz | 3 |").strip().split("\n\n")
    assert [line.split(" | ")[2].strip(" |") for line in lines.splitlines()] == ["own (a)", "(a)", ""]
    assert explained == "**(a)** both."


def test_marks_and_characters_of_text():
    text = page.render_html("# t\n\n## a < b\n\n**bold** `x<y>` & [2] [a & b](https://c.d/e)\n\n| k |\n| --- |\n| <td> |\n", {})
    for written in ('<h2 id="s0">a &lt; b</h2>', "<strong>bold</strong> <code>x&lt;y&gt;</code> &amp;", "&lt;td&gt;",
                    '[2] <a href="https://c.d/e">a &amp; b</a>'):
        assert written in text


def test_the_committed_report_is_of_the_committed_rows(report):
    """`make report` writes it. Charts are compared by their data: another matplotlib draws otherwise."""
    of_text = [path for path in sorted(report.iterdir()) if path.suffix in (".md", ".csv")]
    assert len(of_text) > 1 and not re.search(rf"^\*\*\d\.\*\* .*{NOT_YET}", (report / "report.md").read_text(), re.M)
    for path in of_text:
        assert path.read_text() == (COMMITTED / path.name).read_text(), f"{path.name}: run `make report`"
    written, committed = ({path.name for path in folder.iterdir()} for folder in (report, COMMITTED))
    assert written - {"index.html"} == committed - {"index.html"}, "git ignores the page"


def test_command(tmp_path):
    write(tmp_path / "rows", ssd_row())
    result = invoke("report", "--out", tmp_path / "rows", "--folder", tmp_path / "to")
    assert result.exit_code == 0 and (tmp_path / "to" / "index.html").exists() and "index.html and 1 files" in result.stdout
    result = invoke("report", "--out", tmp_path / "none")
    assert result.exit_code == 2 and "expected a folder that exists" in result.stderr
