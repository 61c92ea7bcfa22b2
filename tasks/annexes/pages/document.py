"""Self-contained HTML pages in one style, with escaped text.

Style, scripts and data are in the file. The file's policy, which browsers enforce, allows no
requests and only the scripts that `document` adds.
"""

import base64
import functools
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources

# HTML forbids most control characters, and terminals may obey them, so pictures replace them.
CONTROL_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}
# Unpaired surrogates, which no encoding can write.
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def document(
    title: str, links: dict[str, str], head: str, body: str, tokens: bool = False, charts: str = ""
) -> str:
    """Returns a page as HTML.

    `links` maps target ids to texts of links under the heading; `head` is HTML before the links,
    `body` HTML after them. `tokens` includes the script that explains the token under the pointer.
    `charts` is `tasks.annexes.pages.chart.data` of the charts in `body`.
    """
    items = "".join(f"<li><a href='#{key}'>{text(name)}</a></li>" for key, name in links.items())
    contents = f"<nav aria-label=Contents><ul>{items}</ul></nav>" if items else ""
    scripts = ["tokens.js"] * tokens + ["uPlot.iife.min.js", "charts.js"] * bool(charts)
    styles = ["page.css"] + ["uPlot.min.css", "charts.css"] * bool(charts)
    sources = " ".join(f"'sha256-{_digest(name)}'" for name in scripts) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {sources}"
    end = "<output id=about></output>" if tokens else ""
    end += f"<script type=application/json id=chart-data>{charts}</script>" if charts else ""
    # Every copy must contain the licence.
    end += f"<!-- uPlot.iife.min.js: {_asset('uPlot.LICENSE')} -->" if charts else ""
    end += "".join(f"<script>{_asset(name)}</script>" for name in scripts)
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        # Without this, browsers ask the page's server for an icon.
        "<link rel=icon href='data:,'>"
        f"<title>{text(title)}</title>"
        f"<style>{''.join(map(_asset, styles))}</style></head><body>"
        f"<header><h1>{text(title)}</h1>{head}{contents}</header>{body}{end}</body></html>\n"
    )


def text(value: object) -> str:
    """Returns a value as HTML text, with control characters as pictures."""
    return html.escape(plain(value))


def plain(value: object) -> str:
    """Returns a value as printable text without control characters."""
    return str(value).translate(CONTROL_PICTURES).translate(_SURROGATES)


def attribute(value: object) -> str:
    """Returns a value as a quoted attribute."""
    return f'"{text(value)}"'


def sections(parts: Iterable[tuple[str, str]]) -> tuple[str, dict[str, str]]:
    """Returns (name, HTML) sections as HTML, and the links to them for `document`."""
    parts = list(parts)
    links: dict[str, str] = {}
    for number, (name, _) in enumerate(parts, 1):
        key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        # A name may be any text, and may occur twice.
        links[f"part-{number}" if not key or key in links else key] = name
    made = "".join(
        f"<article id={key}><h2>{text(name)}</h2>{content}</article>"
        for key, (name, content) in zip(links, parts, strict=True)
    )
    return f"<main>{made}</main>", links


def facts(values: Iterable[tuple[str, object]], kind: str) -> str:
    """Returns names and values as a list of class `kind`: "facts" or "figures"."""
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values
    )
    return f"<dl class={kind}>{items}</dl>"


def note(value: object) -> str:
    """Returns a remark as a paragraph."""
    return f"<p class=note>{text(value)}</p>"


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], html_last: bool = False
) -> str:
    """Returns a table; numeric columns, except the first, are flush right.

    With `html_last`, the last cell of each row is already HTML.
    """
    rows = [list(row) for row in rows]
    numeric = [
        bool(rows) and column > 0 and all(_is_number(row[column]) for row in rows)
        for column in range(len(header))
    ]
    names = "".join(
        f"<th scope=col{' class=number' if right else ''}>{text(name)}</th>"
        for name, right in zip(header, numeric, strict=True)
    )
    lines = ""
    for row in rows:
        cells = [text(cell) for cell in row]
        if html_last:
            cells[-1] = str(row[-1])
        made = (
            f"<td{' class=number' if right else ''}>{cell}</td>"
            for cell, right in zip(cells, numeric, strict=True)
        )
        lines += f"<tr>{''.join(made)}</tr>"
    return (
        f"<div class=scroll tabindex=0><table><caption>{text(caption)}</caption><thead><tr>{names}"
        f"</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace(".", "").rstrip(" %").isdigit()


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("tasks.annexes.pages") / name).read_text(encoding="utf-8")


@functools.cache
def _digest(name: str) -> str:
    return base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()
