"""The report's Markdown with its lines joined, and as a page that loads nothing."""

import base64
import re
from itertools import count
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from ...palette import THEME
from .figure import Figure

_FIGURE = re.compile(r"!\[[^\]]*\]\((?P<name>[\w-]+)\.svg\)\n\n(?P<see>.*) \[Data\]\((?P=name)\.csv\)")
_LONG = r"<(t[hd])([^>]*)>(?=[^<]{25})"  # a cell that is a sentence


def make_environment() -> Environment:
    """The environment of the templates beside this file."""
    return Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
                       lstrip_blocks=True)


def join_lines(text: str) -> str:
    """Markdown in which every paragraph is one line; lines of tables are kept."""
    blocks = [[line.strip() for line in block.splitlines()] for block in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(("\n" if block[0][0] == "|" else " ").join(block) for block in blocks) + "\n"


def render_html(text: str, figures: dict[str, Figure]) -> str:
    """The page; figures by the names that the text has."""
    numbers, places = count(1), count()
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = markdown.render(_FIGURE.sub(r"FIGURE \g<name> \g<see>", text))
    titles = [markdown.renderInline(title) for title in re.findall(r"^## (.*)", text, re.M)]

    def draw(found: re.Match) -> str:
        name, see = found.groups()
        figure = figures[name]
        label = name.replace("-", " ")
        svg = _prefix_ids(figure.svg, name).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        return (f"<figure>{svg}<figcaption>Figure {next(numbers)}. {see} "
                f"<a {_embed(name, figures)}>Data as CSV</a></figcaption></figure>")

    body = re.sub(r"<p>FIGURE ([\w-]+) (.*)</p>", draw, body)
    body = re.sub(r'href="([\w-]+)\.csv"', lambda found: _embed(found[1], figures), body)
    body = re.sub("<h2>", lambda _: f'<h2 id="s{next(places)}">', body)
    body = re.sub(_LONG, r'<\1 class="long"\2>', body)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    opening, section, rest = body.partition('<h2 id="s0">')
    colours = [(name, light, dark) for light, (name, dark) in THEME.items()]
    return make_environment().get_template("page.html.jinja").render(
        opening=opening, sections=section + rest, titles=titles, colours=colours)


def _embed(name: str, figures: dict[str, Figure]) -> str:
    """The attributes of a link to a CSV, which the page holds."""
    return f'download="{name}.csv" href="data:text/csv;base64,{base64.b64encode(figures[name].csv.encode()).decode()}"'


def _prefix_ids(svg: str, name: str) -> str:
    """Make a figure's ids its own: in one document no two may be the same."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{name}-\2", svg)
