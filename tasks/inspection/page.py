"""HTML pages of the project: one style, escaped text, and no need for a network."""

import functools
import html
from collections.abc import Iterable, Sequence
from importlib import resources

# HTML forbids most control characters, and terminals may obey them: they are replaced by pictures.
CONTROL_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def document(title: str, links: dict[str, str], head: str, body: str, interactive: bool) -> str:
    """Returns a page as HTML.

    Args:
      title: title and first heading, as text.
      links: text of each link under the heading, by the id that it leads to.
      head: HTML between the heading and the links.
      body: HTML after the links.
      interactive: whether to include the script that explains the token under the pointer.
    """
    items = "".join(f"<li><a href='#{key}'>{text(name)}</a></li>" for key, name in links.items())
    script = f"<output id=about></output><script>{_asset('page.js')}</script>"
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f"<header><h1>{text(title)}</h1>{head}<nav aria-label=Contents><ul>{items}</ul></nav>"
        f"</header>{body}{script if interactive else ''}</body></html>\n"
    )


def text(value: object) -> str:
    """Returns a value as HTML text, with control characters as pictures."""
    return html.escape(str(value).translate(CONTROL_PICTURES))


def attribute(value: object) -> str:
    """Returns a value as a quoted attribute."""
    return f'"{text(value)}"'


def facts(values: Iterable[tuple[str, object]], kind: str) -> str:
    """Returns names and values as a list; `kind` is its class, "facts" or "figures"."""
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values
    )
    return f"<dl class={kind}>{items}</dl>"


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], html_last: bool = False
) -> str:
    """Returns a table; columns of numbers, but never the first column, are flush right.

    `html_last`: whether the last cell of each row is HTML already.
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
    lines = []
    for row in rows:
        cells = [text(cell) for cell in row]
        if html_last:
            cells[-1] = str(row[-1])
        made = "".join(
            f"<td{' class=number' if right else ''}>{cell}</td>"
            for cell, right in zip(cells, numeric, strict=True)
        )
        lines.append(f"<tr>{made}</tr>")
    return (
        f"<div class=scroll><table><caption>{text(caption)}</caption><thead><tr>{names}</tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace(".", "").rstrip(" %").isdigit()


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("tasks.inspection") / name).read_text(encoding="utf-8")
