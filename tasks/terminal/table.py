"""Tables of text, for terminals and for Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool = False) -> str:
    """Returns `rows` under `header` as lines of aligned text.

    A column is flush right if every cell in it starts like a number. `markdown` adds the bars and
    the rule of a Markdown table.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    numeric = [bool(cells) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    widths = [max(map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(aligned)} |" if markdown else "  ".join(aligned).rstrip()

    dashes = ("-" * (width + 1) for width in widths)
    rule = [dash + "-:"[right] for dash, right in zip(dashes, numeric, strict=True)]
    return "\n".join([line(list(header)), *([f"|{'|'.join(rule)}|"] * markdown), *map(line, cells)])


def _is_number(cell: str) -> bool:
    return cell.lstrip("+-−~± ")[:1].isdigit() or cell in ("", "-", "–")
