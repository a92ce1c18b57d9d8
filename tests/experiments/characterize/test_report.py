"""The report: well-formed, self-contained, honest about what there are no rows of, and whole in a browser."""

import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from experiments import record
from experiments.characterize import operators
from experiments.characterize.gpus import split_by_gpu
from experiments.characterize.report import build, draw, page, paper, steps
from tests.experiments.invoke import invoke
from tests.experiments.rows import ENVIRONMENT, kernel_row, ssd_row, write
from tests.shared import make_once

STEP = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "variant": "fused", "dtype": "bf16", "batch": 4,
        "run": {"documents": False}, **ENVIRONMENT}
H100 = "NVIDIA H100 80GB HBM3"
COMMITTED = Path(__file__).parents[3] / "docs" / "characterisation"
LINKS = ("href", "src", "xlink:href", "action", "poster", "srcset", "data")
NOT_YET = "not measured yet"
NAME = "mamba2 1.3b ssd fused, bf16, batch 4, documents joined"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """From the committed rows."""
    return make_once(tmp_path_factory, "report", lambda folder: build.write(folder, record.read_gpus()))


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
    """The report's sections by title, without charts."""
    with patch.object(draw, "chart", lambda panels: "<svg></svg>"):
        facts = build.collect(rows)
    _, *parts = re.split(r"^## (.*)\n", build.render(facts), flags=re.M)
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
    markdown, page_text = ((report / name).read_text() for name in ("report.md", "index.html"))
    images, tables = ({path.stem for path in report.glob(f"*.{end}")} for end in ("svg", "csv"))
    assert images < tables and len(images) >= 6
    for name in tables - images:
        assert f"({name}.csv)" in markdown and f'download="{name}.csv" href="data:text/csv' in page_text
    for name in images:
        (see,) = re.findall(rf"!\[[^]]+\]\({name}\.svg\)\n\n(.*) \[Data\]", markdown)
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
    assert len(found) == 12 and "![" not in "".join(found.values())
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
    assert "is issue slots, at 90 % of its peak, near its limit." in fourth
    assert "from 3 rows" in found["Where the numbers are from"]


def test_titles_of_bars_take_lines():
    assert draw.place_lines([("a", "x"), ("a", "y"), ("b", "x")]) == [1, 2, 4]


def step_rows(shares: dict[tuple[str, str], float], **other) -> list[dict]:
    """Of (phase, operator)."""
    return [STEP | {"bench": "characterize", "phase": phase, "operator": kind, "share": share, "us": 1000 * share, "steps": 3}
            | other for (phase, kind), share in shares.items()]


def test_steps_of_workloads():
    """The last run's; another GPU's stand apart."""
    last = {("forward", "gemm"): 0.4, ("backward", "gemm"): 0.15, ("forward", "ssm"): 0.25, ("forward", "other"): 0.01,
            ("", "idle"): 0.19}
    rows = [*step_rows({("forward", "gemm"): 0.9}, time="2025-01-01T00:00:00+00:00"), *step_rows(last)]
    figure = build.collect(rows)["figures"]["operators"]
    (line,) = figure.data
    assert line.items() > {"gpu": "H200", "run": NAME, "gemm": 55.0, "ssm": 25.0, "other": 1.0, "idle": 19.0}.items()
    assert [*line][:7] == ["gpu", "run", "idle", "gemm", "ssm", "other", "in forward"]
    both = build.collect(step_rows({("forward", "gemm"): 1.0}, gpu=H100) + rows)["figures"]["operators"]
    assert [(line["gpu"], line["gemm"]) for line in both.data] == [("H100 SXM", 100.0), ("H200", 55.0)]
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
    (line,) = steps.collect(rows)["panels"]["operators"].data
    assert [*line.items()][-6:] == [(name, pytest.approx(share)) for name, share in {
        "in forward": 20, "in backward": 48, "in optimizer": 5, "between phases": 2, "ssm of forward": 40,
        "ssm of backward": 25}.items()]


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
    (tmp_path / "empty").mkdir()
    result = invoke("report", "--out", tmp_path / "empty", "--folder", tmp_path / "other")
    assert result.exit_code == 2 and "which has no row of a GPU" in result.stderr and not (tmp_path / "other").exists()
    result = invoke("report", "--out", tmp_path / "none")
    assert result.exit_code == 2 and "expected a folder that exists" in result.stderr


def copy_rows(rows: list[dict], **scales: float) -> list[dict]:
    """As another GPU would have measured them: an H100's, each of these keys times a number."""
    return [row | {"gpu": H100} | {key: scale * row[key] for key, scale in scales.items() if row.get(key)} for row in rows]


@pytest.fixture
def counted() -> list[dict]:
    """Calls of an H200: mamba_ssm moves 48 MB in 20 us, persistent half of it in a quarter of the time."""
    units = {"block_cycles": 1000.0, "tensor_pct": 1.0, "issue_pct": 40.0, "shared_pct": 1.0, "fadds": 1e6, "fmuls": 0.0,
             "ffmas": 0.0, "tensor_flops": 1e9, "l2_warm_hit_pct": 61.0}
    kernels = {"mamba_ssm": "_chunk_scan_fwd_kernel", "baseline": "chunk_scan_kernel", "fused": "chunk_scan_kernel",
               "persistent": "hopper_scan_kernel"}
    rows = [kernel_row(name, variant, mode, **units | ({"dram_bytes": 24e6, "ncu_us": 5.0} if variant == "persistent" else {}))
            for variant, name in kernels.items() for mode in ("fwd", "bwd")]
    times = [ssd_row(variant, mode=mode, graph_p50_us=10.0 if variant == "persistent" else 25.0)
             for variant in kernels for mode in ("fwd", "bwd")]
    return rows + times + step_rows({("forward", "gemm"): 0.8, ("forward", "ssm"): 0.2})


def test_gpus_stand_apart(counted):
    """With rows of two GPUs each has what it has alone, and its own column, panel and table."""
    slower = copy_rows(counted, ncu_us=2.0, graph_p50_us=2.0, copy_gbps=0.7)
    alone, both = build.collect(counted), build.collect(counted + slower)
    assert [*both["of_gpus"]] == [*split_by_gpu(slower + counted)] == ["H100 SXM", "H200"], "in a fixed order"
    for name, figure in alone["figures"].items():
        lines = [line for line in both["figures"][name].data if line["gpu"] == "H200"]
        assert lines == figure.data and len(both["figures"][name].data) == 2 * len(lines), name
        if figure.svg:
            assert ">H100 SXM</text>" in both["figures"][name].svg and "H200</text>" not in figure.svg
    found, own = sections_of(counted + slower), sections_of(counted)
    table = found["Paper / ours"]
    assert "ours, on one H100 SXM | ours, on one H200 |" in table and "ours, on one H200 | difference" in own["Paper / ours"]
    # 48 MB in 40 us are 1200 GB/s, of 3350; in 20 us 2400, of 4800
    assert "forward U 35.8 %, W 35.8 %" in table and "forward U 50.0 %, W 50.0 %" in table
    assert "another GPU: at as many bytes" in own["Paper / ours"] and "another GPU" not in table
    for title in ("Arithmetic intensity and roofline", "Bandwidth, and how long blocks live", "The paper's 57.5 %",
                  "Kernels by the units they use, and their shares of time", "What a training step spends its time on"):
        for gpu in ("H100 SXM", "H200"):
            assert f"### {gpu}" in found[title] or f"*{gpu}.* " in found[title], title
        assert "###" not in own[title]


def test_roofs_are_of_the_rows_own_gpu(counted):
    settings = ("batch", "seqlen", "accumulate", "checkpoint_activations", "compile")
    step = STEP | {"bench": "step", "sitting": "", "p50_us": 1.0, "ssm_us": 1.0, "options": None,
                   "run": STEP | {"documents": True} | dict.fromkeys(settings)}
    more = [*copy_rows(counted, copy_gbps=0.7), step | {"gpu": H100, "peak_tflops": 650.0}]
    of_gpus = {gpu: build.collect_gpu(rows)["roofline"]["bounds"] for gpu, rows in split_by_gpu(counted + more).items()}
    assert of_gpus["H100 SXM"] == {"data sheet": (3350, 989), "measured": (pytest.approx(0.7 * 4270), 650.0)}
    assert of_gpus["H200"] == {"data sheet": (4800, 989), "measured": (4270.0, 790.0)}
    without = build.collect_gpu(copy_rows(counted))["roofline"]["bounds"]
    assert [*without] == ["data sheet"], "an H200's matmul is no roof of an H100"
