"""One HTML page that needs nothing but itself: style, script and pictures are inside.

Text becomes `Html` only through `escape`, so that the type checker finds a string that was not escaped.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, NewType

from stretto.extras import optional

Html = NewType("Html", str)

# A second lock behind the escaping: the browser itself refuses whatever would be fetched from elsewhere.
POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'"
)

STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --ink: #22303f; --soft: #5f6c7b; --line: #e2e6ea; --blue: #2f5d8a;
  --wash: #f6f8f9; --done: #e6f0ee; --done-ink: #215a53; --open: #fbefdd; --open-ink: #7d5113; --wrong: #f6d9d3;
  --wrong-ink: #8f2f24; --shade: #22303f30;
  --right1: #e6eef6; --right2: #cfdfee; --right3: #b1cbe3; --right4: #92b6d7; --right5: #739fc8;
  --wrong1: #fbe9d3; --wrong2: #f7d6ac; --wrong3: #f1bf83; --wrong4: #e8a55b; --wrong5: #dd8c3c; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 48px 32px 72px; }
h1 { margin: 0; font-size: 30px; font-weight: 650; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 56px 0 16px; font-size: 21px; font-weight: 650; }
h3 { margin: 0 0 4px; font-size: 16px; font-weight: 600; }
p { margin: 12px 0; max-width: 75ch; overflow-wrap: anywhere; }
.subtitle, figcaption, .detail { color: var(--soft); }
.subtitle { margin: 6px 0 0; }
.state { display: inline-block; margin: 18px 0 0; padding: 4px 14px; border-radius: 16px; font-size: 15px;
  background: var(--done); color: var(--done-ink); }
.state.open { background: var(--open); color: var(--open-ink); }
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
.columns th, .columns td { text-align: right; padding: 6px 0 6px 28px; white-space: nowrap; }
.columns th:first-child, .columns td:first-child { text-align: left; padding-left: 0; }
/* A shade at the side shows that there is more to scroll to; it lies under a cover that scrolls along. */
.scroll { overflow-x: auto; background: linear-gradient(to right, var(--paper) 24px, transparent 48px) local 0 0,
  linear-gradient(to left, var(--paper) 24px, transparent 48px) local 100% 0,
  linear-gradient(to right, var(--shade), transparent 14px) 0 0,
  linear-gradient(to left, var(--shade), transparent 14px) 100% 0; background-repeat: no-repeat; }
.scroll:focus-visible, .legendtoggle:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
figure + .scroll, figure + table, table + .scroll { margin-top: 24px; }
.scroll + .grid, p + .grid { margin-top: 28px; }
.grid + .scroll, .scroll + ul { margin-top: 20px; }
/* Of a matrix the classes stay in sight when it is scrolled; it has lines of its own, so that those do not scroll. */
.confusion { border-collapse: separate; border-spacing: 2px; font-size: 14px; }
.confusion th, .confusion td { padding: 3px 8px; border: 0; text-align: center; white-space: nowrap; }
.confusion tbody th { position: sticky; left: 0; background: var(--paper); text-align: right; color: var(--ink); }
.confusion thead th { vertical-align: bottom; color: var(--ink); }
.confusion td { min-width: 34px; border-radius: 3px; background: var(--wash); }
.confusion thead td, .confusion .share { background: none; }
.confusion .share { padding-left: 14px; text-align: right; color: var(--soft); }
.confusion .upright span { writing-mode: vertical-rl; transform: rotate(180deg); }
.confusion.many { border-spacing: 1px; font-size: 11px; line-height: 1; }
.confusion.many th, .confusion.many td { min-width: 0; padding: 1px; border-radius: 1px; }
.confusion.many td:not(.share) { min-width: 12px; height: 12px; }
.confusion.many tbody th { padding-right: 4px; }
.confusion.many .share { padding-left: 8px; }
.confusion .right1 { background: var(--right1); } .confusion .right2 { background: var(--right2); }
.confusion .right3 { background: var(--right3); } .confusion .right4 { background: var(--right4); }
.confusion .right5 { background: var(--right5); }
.confusion .wrong1 { background: var(--wrong1); } .confusion .wrong2 { background: var(--wrong2); }
.confusion .wrong3 { background: var(--wrong3); } .confusion .wrong4 { background: var(--wrong4); }
.confusion .wrong5 { background: var(--wrong5); }
.flow { columns: 300px; column-gap: 40px; }
.flow table { width: 100%; }
.flow tr { break-inside: avoid; }
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
mark { background: var(--wrong); color: var(--wrong-ink); border-radius: 3px; }
footer { margin-top: 56px; font-size: 14px; color: var(--soft); overflow-wrap: anywhere; }
@media screen and (max-width: 800px) { #plot-lengths .annotation { display: none; } }
@media screen and (max-width: 600px) {
  main { padding: 32px 20px 48px; }
  th { white-space: normal; }
}
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14191f; --ink: #dde4ea; --soft: #9aa7b3; --line: #2b343d; --blue: #8fb8df; --wash: #1c232b;
    --done: #17352f; --done-ink: #9fd8cb; --open: #3d2c12; --open-ink: #efc98f; --wrong: #54241e; --wrong-ink: #f3b9b0;
    --shade: #0009;
    --right1: #1b2c3d; --right2: #21384f; --right3: #294765; --right4: #31577c; --right5: #3a6893;
    --wrong1: #362816; --wrong2: #483217; --wrong3: #5c3e1a; --wrong4: #714b1d; --wrong5: #865820; }
  /* Pictures are drawn in dark ink on a clear ground: turned round in lightness, not in hue. */
  .js-plotly-plot, .sample svg, .key i { filter: invert(1) hue-rotate(180deg); }
}
@page { margin: 12mm; }
@media print {
  main { width: 1100px; max-width: none; padding: 0 32px; zoom: 0.63; }
  h2 { break-after: avoid; }
  .number { border: 1px solid var(--line); }
}
"""

# Tab reaches the names in a legend, Enter shows and hides their curves.
CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
PAGE_ENDINGS: Final = (".html", ".htm")
KEYBOARD: Final = """
new MutationObserver(() => {
  for (const name of document.querySelectorAll(".legendtoggle:not([tabindex])")) {
    name.setAttribute("tabindex", "0");
    name.setAttribute("role", "button");
    name.setAttribute("aria-label", "show or hide " + name.parentNode.textContent);
  }
}).observe(document, {childList: true, subtree: true});
document.addEventListener("keydown", event => {
  if (event.key !== "Enter" || !event.target.classList.contains("legendtoggle")) return;
  for (const kind of ["mousedown", "mouseup"]) event.target.dispatchEvent(new MouseEvent(kind, {bubbles: true}));
});
"""


def escape(value: object) -> Html:
    """`value` as text that HTML shows and never interprets; what UTF-8 cannot encode is shown as its escape.

    So are control characters, such as the escapes of terminals, whose place in HTML nothing defines.
    """
    text = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", str(value))
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
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


def flow(part: Html) -> Html:
    """A long and narrow piece in as many columns as there is room for."""
    return Html(f'<div class="flow">{part}</div>')


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table with one heading per column, numbers to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(f'<div class="scroll" tabindex="0"><table class="columns"><tr>{head}</tr>{body}</table></div>')


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


def times_fewer(ratio: float, *, digits: int = 1) -> str:
    """How many times fewer, or more if the ratio is below 1."""
    return f"{ratio:.{digits}f}x fewer" if ratio >= 1 else f"{1 / ratio:.{digits}f}x more"


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
    live: str = "",
) -> str:
    """The whole page: a title, which the browser's tab shows too, what is above the first section, and the sections.

    Titles, headings and the footer are plain text. `scripted` says whether the page has plots, which need the plotting
    library's source inside, once. `live` is a script that fetches from where the page came from.
    """
    script = f"<script>{optional('plotly.offline').get_plotlyjs()}\n{KEYBOARD}</script>" if scripted else ""
    policy = f"{POLICY}; connect-src 'self'" if live else POLICY
    body = join(Html(f"<section><h2>{escape(heading)}</h2>\n{part}</section>") for heading, part in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
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
{f"<script>{live}</script>" if live else ""}
</body>
</html>
"""
