"""The report as a page that loads nothing, and as Markdown beside its figures."""

from __future__ import annotations

import base64
import re
from html import escape
from itertools import count

from .draw import THEME
from .parts import Figure, Section, Table

_TITLE = "Mamba's kernels, characterised"
_LONG = 24  # characters from which on a cell is a sentence


def _colours(which: int) -> str:
    return " ".join(f"{names[0]}: {names[which]};" for names in THEME.values())


_STYLE = f"""
:root {{ color-scheme: light dark; --page: #ffffff; --soft: #f4f6f7; --link: #0b6e99; {_colours(1)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #15191d; --soft: #1f252a; --link: #6cc3ea; {_colours(2)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--page); color: var(--ink);
       font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; }}
h2 {{ font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--grid); padding-top: 1rem; }}
p, li {{ max-width: 44rem; }}
a {{ color: var(--link); }}
nav ol {{ padding-left: 1.4rem; columns: 18rem; }}
figure {{ margin: 1.2rem 0; max-width: 36rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption {{ font-size: .9rem; color: var(--muted); }}
/* shadows at the edges beyond which there is more; what moves with the table covers them at its ends */
.scroll {{ overflow-x: auto; margin: 1rem 0; scrollbar-width: thin;
          background: linear-gradient(to right, var(--page) 40%, transparent) left / 3rem 100% no-repeat local,
                      linear-gradient(to left, var(--page) 40%, transparent) right / 3rem 100% no-repeat local,
                      linear-gradient(to right, var(--muted), transparent) left / .75rem 100% no-repeat scroll,
                      linear-gradient(to left, var(--muted), transparent) right / .75rem 100% no-repeat scroll; }}
table {{ border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--grid);
         overflow-wrap: normal; min-width: 3rem; }}
thead th {{ vertical-align: bottom; border-bottom: 2px solid var(--muted); }}
th:first-child, td:first-child {{ position: sticky; left: 0; background: var(--page); }}
.name, .long {{ text-align: left; }}
td.name, td.number {{ white-space: nowrap; }}
td.long {{ min-width: min(15rem, 36vw); }}
code {{ background: var(--soft); padding: 0 .2em; }}
"""


def html(sections: list[Section], lines: list[str]) -> str:
    """The page. lines: paragraphs below its title."""
    numbers = count(1)
    titles = "".join(f'<li><a href="#s{n}">{escape(section.title)}</a></li>' for n, section in enumerate(sections))
    body = ""
    for n, section in enumerate(sections):
        parts = "".join(_part(part, numbers) for part in section.parts)
        body += f'<section id="s{n}"><h2>{escape(section.title)}</h2>{parts}</section>\n'
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"/><link rel="icon" href="data:,"/>'
            f"<title>{_TITLE}</title><style>{_STYLE}</style></head>\n<body><h1>{_TITLE}</h1>\n"
            f'{"".join(f"<p>{_text(line)}</p>" for line in lines)}\n<nav><ol>{titles}</ol></nav>\n{body}</body></html>\n')


def markdown(sections: list[Section], lines: list[str]) -> str:
    """The same for a reader of text; figures are files beside it."""
    blocks = [f"# {_TITLE}", *lines]
    for section in sections:
        blocks.append(f"## {section.title}")
        for part in section.parts:
            if isinstance(part, Figure):
                blocks += [f"![{part.see}]({part.name}.svg)", f"{part.see} [Data]({part.name}.csv)"]
            elif isinstance(part, Table):
                rule = ["---" if n < part.names else "---:" for n in range(len(part.header))]
                blocks.append("\n".join(f"| {' | '.join(row)} |" for row in (part.header, rule, *part.rows)))
            else:
                blocks.append(part)
    return "\n\n".join(blocks) + "\n"


def _part(part: str | Figure | Table, numbers: count) -> str:
    if isinstance(part, Figure):
        data = base64.b64encode(part.csv.encode()).decode()
        svg = _own_ids(part.svg, part.name).replace("<svg ", f'<svg role="img" aria-label="{escape(part.see)}" ', 1)
        return (f"<figure>{svg}<figcaption>Figure {next(numbers)}. {_text(part.see)} "
                f'<a download="{part.name}.csv" href="data:text/csv;base64,{data}">Data as CSV</a></figcaption></figure>\n')
    if isinstance(part, Table):
        head = _row("th", part.header, part.names)
        rows = "".join(_row("td", row, part.names) for row in part.rows)
        return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>\n'
    return f"<p>{_text(part)}</p>\n"


def _row(tag: str, cells: tuple[str, ...], names: int) -> str:
    line = ""
    for n, cell in enumerate(cells):
        kind = "long" if len(cell) > _LONG else "name" if n < names else "number"
        line += f'<{tag} class="{kind}">{_text(cell)}</{tag}>'
    return f"<tr>{line}</tr>\n"


def _text(text: str) -> str:
    """Markdown's `code`, **bold** and [links](https://...), the only marks that paragraphs use."""
    text = re.sub(r"\[([^\]]+)\]\((https://[^)]+)\)", r'<a href="\2">\1</a>', escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


def _own_ids(svg: str, name: str) -> str:
    """Ids are the document's: two figures may not share one."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{name}-\2", svg)
