"""One HTML page that needs nothing but itself: style, script and pictures are inside.

Text becomes `Html` only through `escape`, so that the type checker finds a string that was not escaped.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final, NewType

from stretto.extras import optional

Html = NewType("Html", str)

# A second lock behind the escaping: the browser itself refuses whatever would be fetched from elsewhere.
POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'"
)

STYLE: Final = """
:root { color-scheme: light; --ink: #22303f; --soft: #667382; --line: #e2e6ea; --blue: #2f5d8a; --wash: #f6f8f9; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 48px 32px 72px; }
h1 { margin: 0; font-size: 30px; font-weight: 650; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 56px 0 16px; font-size: 21px; font-weight: 650; }
h3 { margin: 0 0 4px; font-size: 16px; font-weight: 600; }
p { margin: 12px 0; max-width: 75ch; overflow-wrap: anywhere; }
.subtitle, figcaption, .detail { color: var(--soft); }
.subtitle { margin: 6px 0 0; }
.state { display: inline-block; margin: 18px 0 0; padding: 4px 14px; border-radius: 16px; font-size: 15px;
  background: #e6f0ee; color: #215a53; }
.state.open { background: #fbefdd; color: #7d5113; }
.headline { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 16px; margin: 28px 0 0; }
.number { padding: 16px; background: var(--wash); border-radius: 10px; }
.number .label { font-size: 14px; color: var(--soft); }
.number .value { font-size: 23px; font-weight: 650; line-height: 1.45; color: var(--blue); overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.number .detail { font-size: 13.5px; line-height: 1.4; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(470px, 100%), 1fr)); gap: 36px 32px; }
.grid > * { min-width: 0; }
.grid + table { margin-top: 32px; }
figure { margin: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figcaption { margin-top: 4px; font-size: 14px; max-width: 110ch; }
table { border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 28px 6px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
td { overflow-wrap: anywhere; }
.columns th, .columns td { text-align: right; padding: 6px 0 6px 28px; }
.columns th:first-child, .columns td:first-child { text-align: left; padding-left: 0; }
.scroll { overflow-x: auto; }
figure + .scroll, figure + table, table + .scroll { margin-top: 24px; }
.scroll + .grid { margin-top: 28px; }
ul { margin: 0; padding-left: 20px; }
li { margin: 4px 0; max-width: 85ch; overflow-wrap: anywhere; }
.samples { display: flex; flex-wrap: wrap; gap: 16px; align-items: stretch; }
.sample { min-width: 200px; max-width: 100%; padding: 16px 18px; border: 1px solid var(--line); border-radius: 10px;
  break-inside: avoid; }
.sample svg { display: block; max-width: 100%; height: auto; margin: 0 0 12px; }
.sample dl { display: grid; grid-template-columns: auto 1fr; gap: 0 14px; margin: 0; font-size: 15px; }
.sample dt { color: var(--soft); }
.sample dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; max-width: 430px; font-size: 14px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 2px; }
mark { background: #f6d9d3; color: #8f2f24; border-radius: 3px; }
footer { margin-top: 56px; font-size: 14px; color: var(--soft); overflow-wrap: anywhere; }
@media screen and (max-width: 800px) { #plot-lengths .annotation { display: none; } }
@page { margin: 12mm; }
@media print {
  main { width: 1100px; max-width: none; padding: 0 32px; zoom: 0.63; }
  h2 { break-after: avoid; }
  .number { border: 1px solid var(--line); }
}
"""


def escape(value: object) -> Html:
    """`value` as text that HTML shows and never interprets; what UTF-8 cannot encode is shown as its escape."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return Html(html.escape(text, quote=True))


def join(parts: Iterable[Html]) -> Html:
    """Pieces one after the other."""
    return Html("\n".join(parts))


def paragraph(text: str) -> Html:
    """A paragraph of plain text."""
    return Html(f"<p>{escape(text)}</p>")


def bullets(lines: Iterable[object]) -> Html:
    """A list of plain texts."""
    return Html("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """A table of names and values."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return Html(f"<table>{body}</table>")


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table with one heading per column, numbers to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(f'<div class="scroll"><table class="columns"><tr>{head}</tr>{body}</table></div>')


def figure(picture: Html, *, title: str, caption: str, wide: bool = False) -> Html:
    """A picture with its title above and its caption below."""
    kind = ' class="wide"' if wide else ""
    return Html(f"<figure{kind}><h3>{escape(title)}</h3>{picture}<figcaption>{escape(caption)}</figcaption></figure>")


def grid(parts: Iterable[Html]) -> Html:
    """Pieces side by side where there is room."""
    return Html(f'<div class="grid">{join(parts)}</div>')


def headline(numbers: Iterable[tuple[str, str, str]]) -> Html:
    """The row of big numbers: for each what it is, its value as text, and a few words of context."""
    cells = "".join(
        f'<div class="number"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="detail">{escape(detail)}</div></div>'
        for label, value, detail in numbers
    )
    return Html(f'<div class="headline">{cells}</div>')


def sentence(words: str) -> str:
    """The same words with a capital first letter."""
    return words[:1].upper() + words[1:]


def duration(seconds: float) -> str:
    """A time as a person says it."""
    if not math.isfinite(seconds) or seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def page(
    *,
    title: str,
    subtitle: str,
    top: Iterable[Html],
    sections: Iterable[tuple[str, Html]],
    footer: str,
    scripted: bool = True,
) -> str:
    """The whole page: a title, which the browser's tab shows too, what is above the first section, and the sections.

    Titles, headings and the footer are plain text. `scripted` says whether the page has plots, which need the plotting
    library's source inside, once.
    """
    script = f"<script>{optional('plotly.offline').get_plotlyjs()}</script>" if scripted else ""
    body = join(Html(f"<section><h2>{escape(heading)}</h2>\n{part}</section>") for heading, part in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
{script}
</head>
<body>
<main>
<header><h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p></header>
{join(top)}
{body}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""
