"""Render a report as one self-contained HTML file, without scripts, for light and dark mode.

The file is well-formed XML too, so that any parser can check it.
"""

from __future__ import annotations

from html import escape

from remora.deployments.bench.report.record import BarChart, Report, TextTable
from remora.deployments.bench.report.rows import all_tables, facts, notes
from remora.deployments.bench.report.svg import bar_chart, line_plot

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --back: #ffffff; --faint: #e3e6ea;
  --head: #f4f5f7; --c0: #2f6fb0; --c1: #d1600f; --c2: #2f8f4e; --c3: #8a4fb3; --c4: #b3355f;
  --c5: #6f6f1f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --back: #16181d; --faint: #33373f;
  --head: #1f2229; --c0: #6aa9e9; --c1: #f09a52; --c2: #6cc78a; --c3: #c094e4; --c4: #ee7ea2;
  --c5: #c9c96a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; }
th { background: var(--head); font-weight: 600; }
th:first-child, td:first-child, .facts td { text-align: left; }
.facts td { overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; max-width: 42rem; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
"""


def render_html(report: Report) -> str:
    """Return the HTML file as text."""
    body = [f"<h1>remora bench: {escape(report.target)}</h1>"]
    if found := notes(report):
        body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in found) + "</ul>")
    tables = all_tables(report)
    body += map(_table, tables)
    body += [
        bar_chart(plot) if isinstance(plot, BarChart) else line_plot(plot) for plot in report.plots
    ]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts(report)
    )
    body.append(f'<h2>How it was measured</h2><table class="facts">{rows}</table>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>remora bench: {escape(report.target)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(table: TextTable) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table>'
        f"<tr>{header}</tr>{rows}</table></div>"
    )
