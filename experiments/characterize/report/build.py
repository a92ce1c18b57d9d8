"""Writes the report: what the sections collect, put into the text of report.md.jinja, as Markdown and as a page."""

from pathlib import Path

from ... import record
from ...shapes import DIRECTIONS
from .. import classes, definitions, frozen, projection
from ..gpus import GPUS, split_by_gpu
from . import bandwidth, draw, kernels, nearest, page, paper, projected, roofline, scaling, steps
from .figure import Figure, stack_lines, stack_panels

_SHAPE, _DTYPE = "8b-b4", "bf16"  # what counters are shown of: the paper's sizes, at a batch that fills a GPU
_TIMELESS = ("tests", "fuzz")  # benches that say nothing of times


def collect(rows: list[dict]) -> dict[str, object]:
    """What the text of the report is made from, by the names that it has there; rows: of GPUs."""
    of_gpus = {gpu: collect_gpu(of) for gpu, of in split_by_gpu(rows).items()}
    found, timed = projected.collect(rows), [row for row in rows if row["bench"] not in _TIMELESS]
    return {
        "of_gpus": of_gpus, "projected": found, "figures": _draw_figures(of_gpus) | found.get("figures", {}),
        "sheet": projected.list_sheet(of_gpus), "shape": _SHAPE, "dtype": _DTYPE,
        "count": len(timed), "gpus": sorted({row["gpu"] for row in timed}),
        "commits": sorted({row["git_sha"][:7] for row in timed if row["git_sha"]}),
    }


def collect_gpu(rows: list[dict]) -> dict[str, object]:
    """What the rows of one GPU say, by section. Sections see no rows of another, so no number mixes two."""
    counted = [call for call in definitions.keep_fastest_chunk(definitions.read_calls(rows))
               if call.row["dtype"] == _DTYPE and record.has_default_options(call.row)]
    calls = [call for call in counted if call.row["shape"] == _SHAPE]
    return {
        "calls": calls, "forward": {call.row["variant"]: call for call in calls if call.row["mode"] == "fwd"},
        "paper": paper.collect(calls, rows), "steps": steps.collect(rows), "roofline": roofline.collect(calls, rows),
        "ratios": kernels.collect_ratios(calls), "shares": kernels.collect_shares(calls),
        "hits": kernels.collect_hit_rates(calls), "stalls": kernels.collect_stalls(calls),
        "bandwidth": bandwidth.collect(calls), "nearest": nearest.collect(counted, rows),
        "scaling": scaling.collect_operator(rows), "components": scaling.collect_components(rows)}


def _draw_figures(of_gpus: dict[str, dict]) -> dict[str, Figure]:
    """{name: figure}, a panel, or lines of a table, for each GPU that has some of that name."""
    return {name: stack_panels(of) for name, of in _gather(of_gpus, "panels").items()} | {
        name: stack_lines(of) for name, of in _gather(of_gpus, "tables").items()}


def _gather(of_gpus: dict[str, dict], kind: str) -> dict[str, dict]:
    """{name: {GPU: what its sections have of this kind by that name}}."""
    found: dict[str, dict] = {}
    for gpu, of in of_gpus.items():
        for section in of.values():
            for name, one in section.get(kind, {}).items() if isinstance(section, dict) else ():
                found.setdefault(name, {})[gpu] = one
    return found


def find_measured(of_gpus: dict[str, dict], section: str, key: str | None = None) -> dict[str, dict]:
    """{GPU: section} of those GPUs whose rows have something for it, or for this part of it."""
    return {gpu: of[section] for gpu, of in of_gpus.items() if (of[section].get(key) if key else of[section])}


def render(facts: dict[str, object]) -> str:
    """The report in Markdown."""
    environment = page.make_environment()
    environment.filters |= {"num": format_number, "share_reasons": paper.share_reasons}
    environment.globals |= {"DIRECTIONS": DIRECTIONS, "GPUS": GPUS, "classes": classes,
                            "main_peak": bandwidth.main_peak, "kernels": kernels, "of_bandwidth": bandwidth, "of_paper": paper,
                            "of_nearest": nearest, "ENOUGH": projected.ENOUGH,
                            "is_met": projected.is_met, "find_measured": find_measured, "summarise": projection.summarise,
                            "frozen": frozen}
    return page.join_lines(environment.get_template("report.md.jinja").render(facts))


def format_number(value: float | None, digits: int = 0) -> str:
    """A cell; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def write(folder: Path, rows: list[dict]) -> list[Path]:
    """Writes index.html, report.md, a CSV for each figure and long table, and an SVG for each figure; returns the paths, the
    page first. rows: of GPUs.
    """
    facts = collect(rows)
    figures = facts["figures"]
    text = render(facts)
    texts = {"index.html": page.render_html(text, figures), "report.md": text}
    for name, figure in figures.items():
        texts[f"{name}.csv"] = figure.csv
        if figure.svg:
            texts[f"{name}.svg"] = draw.make_standalone(figure.svg)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in texts.items():
        (folder / name).write_text(content)
    return [folder / name for name in texts]
