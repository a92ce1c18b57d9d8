"""Writes the report: what the sections collect, put into the text of report.md.jinja, as Markdown and as a page."""

from pathlib import Path

from ... import record
from ...shapes import DIRECTIONS
from .. import classes, definitions, frozen, projection
from ..gpus import GPUS
from . import bandwidth, draw, kernels, page, paper, projected, roofline, scaling, steps

_SHAPE, _DTYPE = "8b-b4", "bf16"  # what counters are shown of: the paper's sizes, at a batch that fills a GPU
_TIMELESS = ("tests", "fuzz")  # benches that say nothing of times


def collect(rows: list[dict]) -> dict[str, object]:
    """What the text of the report is made from, by the names that it has there; rows: of GPUs."""
    calls = [call for call in definitions.read_calls(rows) if (call.row["shape"], call.row["dtype"]) == (_SHAPE, _DTYPE)
             and record.has_default_options(call.row)]
    gpus = [row["gpu"] for row in definitions.keep_one_gpu([call.row for call in calls])]
    calls = [call for call in calls if call.row["gpu"] in gpus]
    timed = [row for row in rows if row["bench"] not in _TIMELESS]
    return {
        "calls": calls, "forward": {call.row["variant"]: call for call in calls if call.row["mode"] == "fwd"},
        "paper": paper.collect(calls, rows), "steps": steps.collect(rows), "roofline": roofline.collect(calls, rows),
        "ratios": kernels.collect_ratios(calls), "shares": kernels.collect_shares(calls),
        "hits": kernels.collect_hit_rates(calls), "stalls": kernels.collect_stalls(calls),
        "bandwidth": bandwidth.collect(calls),
        "scaling": scaling.collect_operator(rows), "components": scaling.collect_components(rows),
        "projected": projected.collect(rows), "sheet": projected.list_sheet(), "shape": _SHAPE, "dtype": _DTYPE,
        "count": len(timed), "gpus": sorted({row["gpu"] for row in timed}),
        "commits": sorted({row["git_sha"][:7] for row in timed if row["git_sha"]}),
    }


def render(facts: dict[str, object]) -> str:
    """The report in Markdown."""
    environment = page.make_environment()
    environment.filters |= {"num": format_number, "share_reasons": paper.share_reasons, "name": kernels.shorten}
    environment.globals |= {"DIRECTIONS": DIRECTIONS, "GPUS": GPUS, "classes": classes, "definitions": definitions,
                            "main_peak": bandwidth.main_peak, "kernels": kernels, "of_bandwidth": bandwidth, "of_paper": paper,
                            "of_steps": steps, "ENOUGH": projected.ENOUGH,
                            "is_met": projected.is_met, "summarise": projection.summarise, "frozen": frozen}
    return page.join_lines(environment.get_template("report.md.jinja").render(facts))


def format_number(value: float | None, digits: int = 0) -> str:
    """A cell; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def write(folder: Path, rows: list[dict]) -> list[Path]:
    """Writes index.html, report.md, and an SVG and a CSV for each figure; returns the paths, the page first. rows: of GPUs."""
    facts = collect(rows)
    figures = {name: figure for section in facts.values() if isinstance(section, dict)
               for name, figure in section.get("figures", {}).items()}
    text = render(facts)
    texts = {"index.html": page.render_html(text, figures), "report.md": text}
    for name, figure in figures.items():
        texts |= {f"{name}.svg": draw.make_standalone(figure.svg), f"{name}.csv": figure.csv}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in texts.items():
        (folder / name).write_text(content)
    return [folder / name for name in texts]
