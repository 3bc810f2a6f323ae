"""HTML of the report's pages: escaping, tables, style and script."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

PLOTLY = "plotly.min.js"

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #ffffff; --soft: #f3f4f6;
  --line: #c9ccd1; --link: #0059a8; --loud: #a63a00; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --back: #16181c; --soft: #22262c;
  --line: #454b54; --link: #7cc0ff; --loud: #ff9c5b; } }
body { margin: 0; background: var(--back); color: var(--text);
  font: 17px/1.5 system-ui, "Segoe UI", "Liberation Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.25; }
h2 { font-size: 1.35rem; margin-top: 3rem; padding-top: 1rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.08rem; margin: 2rem 0 .4rem; }
h1, h2, td, th { overflow-wrap: anywhere; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .table:focus-visible { outline: 3px solid var(--link);
  outline-offset: 2px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; margin: .6rem 0; }
th, td { padding: .3rem .65rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; min-width: 3rem; }
thead th { background: var(--soft); }
tbody th { font-weight: 600; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: .4rem 0 1rem; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; padding: 6px;
  box-sizing: border-box; border: 1px solid var(--line); }
figcaption { font-size: .95rem; max-width: 60rem; }
.note, .wrong { border-left: 4px solid var(--loud); background: var(--soft); padding: .5rem .8rem; }
.wrong { color: var(--loud); font-weight: 700; }
summary { cursor: pointer; padding: .3rem 0; color: var(--link); }
.interactive { display: none; }
.js .interactive { display: block; }
.plot { min-height: 30rem; }
"""

# A figure is drawn when its fold is opened. Without the script the folds are not shown.
SCRIPT = """
document.documentElement.classList.add('js');
const dark = matchMedia('(prefers-color-scheme: dark)').matches;
const colours = dark ? ['#16181c', '#e8e8e8', '#454b54'] : ['#ffffff', '#1b1b1b', '#c9ccd1'];
for (const fold of document.querySelectorAll('details.interactive')) {
  fold.addEventListener('toggle', () => {
    const place = document.getElementById(fold.dataset.for);
    if (!fold.open || place.firstChild) return;
    const figure = JSON.parse(document.getElementById(fold.dataset.for + '-data').textContent);
    const layout = {...figure.layout, paper_bgcolor: colours[0], plot_bgcolor: colours[0],
      font: {color: colours[1], size: 14}};
    for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name))
      layout[name] = {...layout[name], gridcolor: colours[2], zerolinecolor: colours[2]};
    Plotly.newPlot(place, figure.data, layout, {responsive: true, displaylogo: false});
  });
}
"""


class Html(str):
    """Text that is HTML already."""


def escape(value: object) -> str:
    """``value`` as text in HTML."""
    return value if isinstance(value, Html) else html.escape(str(value))


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n{body}\n</main>"
        f'<script src="{PLOTLY}" defer></script><script>{SCRIPT}</script></body></html>\n'
    )


def table(header: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column names its rows; numbers stand to the right."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = []
    for row in rows:
        cells = [
            f"<td{' class=n' if _is_number(value) else ''}>{escape(value)}</td>"
            for value in row[1:]
        ]
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) or bool(re.fullmatch(r"[\d.,]+[x%]?( so far)?", str(value)))
