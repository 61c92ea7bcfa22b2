"""Shows windows, and the examples that objectives make from them, in a terminal or an HTML page.

A span has the same colour in the window, in the inputs (its sentinel) and in the targets (sentinel
and text). The page needs neither a network nor scripts.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tasks.annexes.inspecting.trace import SHUFFLED_PARTS, Side, Trace
from tasks.annexes.pages import document as html_page
from tasks.cache.lineage import Part
from tasks.cache.windows import Place
from tasks.decode import REPLACEMENT, decode, is_text, piece, spelled, texts
from tasks.objectives import Lengths
from tasks.vocabulary import PAIR_BORDER, TokenIds

_EOS = "EOS"  # label of the token
_COLOURS = 8  # tasks/annexes/pages/page.css has as many classes .c0, .c1, …
# xterm colours, light enough for black text.
_TERMINAL = (217, 157, 153, 222, 183, 123, 215, 219)
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A window to show."""

    title: str
    facts: tuple[tuple[str, str], ...]  # names and values, shown unchanged
    places: tuple[Place, ...]  # the window's places in the cache, one per shard
    parts: tuple[Part, ...]  # parts of documents that form the window
    corpus: str
    tokens: np.ndarray  # int32[N] tokens of the window
    trace: Trace | None  # the objective's example; None shows the window alone
    lengths: Lengths
    unit: str = "document"  # the word for what a part belongs to

    def text(self, part: Part, ids: TokenIds) -> str:
        return decode(self.tokens[part.position : part.position + part.tokens].tolist(), ids)


@dataclasses.dataclass(frozen=True)
class Token:
    """A token to show."""

    # id, piece: as in the vocabulary.
    id: int
    piece: str
    text: str  # its share of the text, made printable
    mark: bool  # it is a special token: EOS, a sentinel or a mode token
    own: bool  # the objective added it
    # span, place: its span and its position in the window; -1 for none.
    span: int
    place: int
    used: bool = True  # it is in the example
    note: str = ""  # the text that it replaces
    label: str = ""  # name of the segment that begins here


@dataclasses.dataclass(frozen=True)
class Strip:
    """One sequence to show: the window, the inputs or the targets.

    `note` is a remark beside the heading; `filled`, the share of positions that hold tokens, or
    None; `blocks`, the (heading, tokens) of each block.
    """

    name: str
    note: str
    filled: float | None
    blocks: tuple[tuple[str, tuple[Token, ...]], ...]


def features(trace: Trace) -> list[tuple[str, str]]:
    """Returns names and values of the example's features other than inputs and targets."""
    found = []
    for name, values in trace.more.items():
        first, second = (int((values == number).sum()) for number in (1, 2))
        described = {
            "prefix": f"{first:,} positions with attention both ways",
            "order": "changed" if first else "as in the text",
            "segments": f"{first:,} and {second:,} positions",
        }
        found.append((name, described.get(name, f"{len(values):,} values")))
    return found


def _extent(part: Part) -> str:
    end = part.first + part.tokens
    if not part.first and end == part.whole:
        return f"all {part.whole:,} tokens"
    of = "" if part.whole is None else f" of {part.whole:,}"
    return f"tokens {part.first:,} to {end:,}{of}"


def strips(sample: Sample, ids: TokenIds) -> list[Strip]:
    """Returns the window, divided into documents, and the example's inputs and targets."""
    trace, size = sample.trace, len(sample.tokens)
    plain = Side(sample.tokens, np.arange(size), np.full(size, -1))
    side = trace.window if trace else plain
    tokens = _tokens(side, ids, side, trace.used_N if trace else np.ones(size, bool))
    blocks = [
        (_heading(number, part), tokens[part.position : part.position + part.tokens])
        for number, part in enumerate(sample.parts, 1)
    ]
    if PAIR_BORDER in sample.tokens:  # not a token of the document
        blocks = [(blocks[0][0], tokens)]
    blocks = [(heading, _trimmed(made)) for heading, made in blocks]
    found = [Strip("window", _window_note(sample), None, tuple(blocks))]
    if trace is None:
        return found
    for name, feature, length in (
        ("inputs", trace.inputs, sample.lengths.inputs),
        ("targets", trace.targets, sample.lengths.targets),
    ):
        if feature is None:
            continue
        made = _tokens(feature, ids, trace.window, np.ones(size, bool))
        if "segments" in trace.more and name == "inputs":
            made = _with_segments(made, trace.more["segments"])
        filled = len(made) / length
        padding = f"{1 - filled:.1%} padding" if filled < 1 else "no padding"
        note = f"{len(made):,} of {length:,} positions, {padding}"
        if name == "inputs":
            note += _replacements(trace, made)
        elif trace.weights_L is None:
            note += "; every token is in the loss"
        else:
            note += f"; {int(trace.weights_L.sum()):,} tokens are in the loss"
        found.append(Strip(name, note, filled, (("", _trimmed(made)),)))
    return found


def _heading(number: int, part: Part) -> str:
    # An id made by Palimpsest begins with the file name.
    file = "" if part.id.startswith(part.file) else f", {part.file}"
    return f"{number} \u00b7 {part.id}{file} \u00b7 {_extent(part)}"


def _trimmed(made: tuple[Token, ...]) -> tuple[Token, ...]:
    first = dataclasses.replace(made[0], text=made[0].text.removeprefix(" "))
    return (first, *made[1:])


def _window_note(sample: Sample) -> str:
    parts = len(sample.parts)
    note = f"{len(sample.tokens):,} tokens of {parts:,} {sample.unit}{'s' if parts > 1 else ''}"
    trace = sample.trace
    if not trace:
        return note
    if not trace.exact:
        return f"{note}; the origin of the example's tokens is unknown for this objective"
    if trace.shuffled:
        return f"{note}; the inputs are shuffled, and each colour is one of {SHUFFLED_PARTS} parts"
    unused = int((~trace.used_N).sum())
    spans = int(trace.window.spans_L.max(initial=-1)) + 1
    coloured = int((trace.window.spans_L >= 0).sum())
    if spans:
        note += f"; {coloured:,} to be predicted, in {spans:,} span{'s' if spans > 1 else ''}"
    return f"{note}; {unused:,} not used in this example" if unused else note


def _replacements(trace: Trace, made: Sequence[Token]) -> str:
    """Describes how the inputs hide tokens, unless each span has one sentinel."""
    replaced = [token for token in made if token.own and token.span >= 0]
    pieces = sum(not token.mark for token in replaced)
    marks = sorted({token.piece for token in replaced if token.mark})
    kept = sum(not token.own and token.span >= 0 for token in made)
    if trace.shuffled or not replaced or (len(marks) > 1 and not pieces and not kept):
        return ""
    ways = [f"{len(replaced) - pieces:,} by {' '.join(marks)}"] if marks else []
    ways += [f"{pieces:,} by random pieces"] if pieces else []
    ways += [f"{kept:,} kept"] if kept else []
    return f"; tokens to predict are replaced: {', '.join(ways)}"


def _tokens(side: Side, ids: TokenIds, window: Side, used_N: np.ndarray) -> tuple[Token, ...]:
    numbers, made = side.tokens_L.tolist(), []
    columns = numbers, texts(numbers, ids), side.places_L.tolist(), side.spans_L.tolist()
    for token, text, place, span in zip(*columns, strict=True):
        name = piece(token, ids)
        mark = not is_text(token, ids)
        own = place < 0 and token != ids.special.eos
        note = ""
        if own and span >= 0:
            note = decode(window.tokens_L[window.spans_L == span].tolist(), ids)
        shown = _EOS if token == ids.special.eos else name if mark or text == REPLACEMENT else text
        used = place < 0 or bool(used_N[place])
        words = (printable(name), printable(shown))
        made.append(Token(token, *words, mark, own, span, place, used, printable(note)))
    return tuple(made)


def _with_segments(made: tuple[Token, ...], segments_L: np.ndarray) -> tuple[Token, ...]:
    before = [0, *segments_L[:-1].tolist()]
    return tuple(
        dataclasses.replace(token, label=f"segment {now}") if now != then else token
        for token, now, then in zip(made, segments_L.tolist(), before, strict=True)
    )


def printable(text: str) -> str:
    """Replaces control characters, which a terminal may obey, with pictures."""
    return text.translate(_PICTURES)


_PICTURES = {**html_page.CONTROL_PICTURES, ord("\n"): "\u21b5\n"}


def _runs(made: Sequence[Token]) -> Iterator[tuple[int, list[Token]]]:
    """Yields (span, tokens) for adjacent tokens shown alike; a special token is yielded alone."""

    def kind(numbered: tuple[int, Token]) -> tuple[int, bool, bool, int]:
        number, token = numbered
        alone = number if token.mark or token.label else -1
        return token.span, token.used, token.own, alone

    for _, group in itertools.groupby(enumerate(made), kind):
        tokens = [token for _, token in group]
        yield tokens[0].span, tokens


# ---- the terminal


def print_samples(samples: Sequence[Sample], ids: TokenIds) -> None:
    """Prints samples; without colours, spans are in numbered brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    plain = not console.is_terminal or console.no_color
    for sample in samples:
        console.print(Text(f"── {printable(sample.title)} ──", style="bold"))
        for name, value in _facts(sample):
            console.print(Text(f"{name}: {printable(value)}", style="dim"))
        for strip in strips(sample, ids):
            line = Text(f"\n{strip.name.upper()}", style="bold")
            console.print(line.append(f"  {strip.note}", style="not bold dim"))
            for heading, made in strip.blocks:
                if heading:
                    console.print(Text(f"▌{printable(heading)}", style="cyan"))
                console.print(_line(made, plain))
        console.print()


def _line(made: Sequence[Token], plain: bool) -> Any:
    from rich.text import Text

    line = Text()
    before = -1  # span of the preceding special token
    for span, tokens in _runs(made):
        text = "".join(token.text for token in tokens)
        first = tokens[0]
        if first.label:
            line.append(f"[{first.label}] ", style="cyan")
        style = "" if first.used else "dim"
        if span >= 0:
            style = f"black on color({_TERMINAL[span % _COLOURS]})" + " bold" * first.mark
        elif first.mark:
            style = "cyan"
        if first.mark:
            line.append(" " if line.plain[-1:].strip() else "")
            text = f"⟨{text}⟩" if text == "EOS" else text
        # The colour begins with the word, not its space, unless the token is only a space.
        inner = text.lstrip(" ") or text
        line.append(text[: len(text) - len(inner)])
        if plain and span >= 0 and not first.mark and before != span:
            inner = f"⟦{inner}⟧{str(span).translate(_SUBSCRIPTS)}"
        elif plain and not first.used:
            inner = f"⸨{inner}⸩"
        line.append(inner, style=style)
        before = span if first.mark else -1
    return line


def _facts(sample: Sample) -> list[tuple[str, str]]:
    places = "; then ".join(
        f"{place.path.rpartition('/')[2]}, row {place.row:,}, from token {place.position:,}"
        for place in sample.places
    )
    return [*sample.facts, ("corpus", sample.corpus), ("place", places)]


# ---- the page


def page(title: str, samples: Sequence[Sample], ids: TokenIds) -> str:
    """Returns one HTML page that shows the samples."""
    made = {f"s{number}": sample for number, sample in enumerate(samples, 1)}
    articles = "".join(article(key, each, ids) for key, each in made.items())
    return html_page.document(
        title,
        {key: each.title for key, each in made.items()},
        head="",
        body=f"{LEGEND}<main>{articles}</main>",
        tokens=True,
    )


LEGEND = (
    "<p class=legend><span class='s c0'>A span</span> has the same colour everywhere: in the "
    "window, its <bdi class='m c0'>sentinel</bdi> in the inputs, its text in the targets. "
    "<span class=unused>Faint text</span> is not in the example; "
    "<span class='s o c2'>text with a wavy underline</span> was put there by the objective. "
    "Point at a token, or touch it, to see its piece and id.</p>"
    "<input type=checkbox id=pieces><label for=pieces>pieces and ids</label>"
)


def article(key: str, sample: Sample, ids: TokenIds) -> str:
    """Returns a sample as HTML; its page needs LEGEND before it, and `tokens=True`."""
    found = strips(sample, ids)
    shown = "".join(map(_strip, found))
    lengths = [sum(len(made) for _, made in strip.blocks) for strip in found[1:]]
    even = " even" if len(lengths) == 2 and lengths[1] > lengths[0] / 2 else ""
    return (
        f"<article id={key}><h2>{html_page.text(sample.title)}</h2>"
        f"{html_page.facts(_facts(sample), 'facts')}"
        f"<div class='strips{even}'>{shown}</div></article>"
    )


def _strip(strip: Strip) -> str:
    filled = ""
    if strip.filled is not None:
        filled = f"<div class=filled><div style='width:{100 * strip.filled:.1f}%'></div></div>"
    blocks = "".join(
        (f"<h4>{html_page.text(heading)}</h4>" if heading else "")
        + f"<div class=text dir=auto>{_html(made)}</div>"
        for heading, made in strip.blocks
    )
    return (
        f"<section class={strip.name}><h3>{strip.name.capitalize()}</h3>"
        f"<p class=note>{html_page.text(strip.note)}</p>{filled}{blocks}</section>"
    )


def _html(made: Sequence[Token]) -> str:
    out = []
    for span, tokens in _runs(made):
        first = tokens[0]
        if first.label:
            out.append(f"<bdi class=label>{html_page.text(first.label)}</bdi>")
        colour, number = (f" c{span % _COLOURS}", f" data-s={span}") if span >= 0 else ("", "")
        if first.mark:
            # <bdi> keeps the letters of a sentinel from deciding the text's direction.
            kind, shown = "e" if first.text == _EOS else "m", _token(first, first.text)
            # <wbr>: a line may end before it although there is no space.
            out.append(f"<wbr><bdi class='{kind}{colour}'{number}>{shown}</bdi>")
            continue
        inner = [_token(token, token.text) for token in tokens]
        if span >= 0 and first.text.startswith(" ") and first.text.strip():
            # The colour begins with the word, not its space, unless the token is only a space.
            out.append(" ")
            inner[0] = _token(first, first.text[1:])
        joined = "".join(inner)
        classes = ("s" if span >= 0 else "") + " o" * first.own + " unused" * (not first.used)
        classes = (classes + colour).strip()
        out.append(f"<span class='{classes}'{number}>{joined}</span>" if classes else joined)
    return "".join(out)


def _token(token: Token, text: str) -> str:
    note = f" data-n={html_page.attribute(token.note)}" if token.note else ""
    place = f" data-w={token.place}" if token.place >= 0 else ""
    attributes = f"data-p={html_page.attribute(token.piece)} data-i={token.id}{place}{note}"
    return f"<i {attributes}>{html_page.text(text)}</i>"


def row(sample: Sample, ids: TokenIds) -> dict[str, str]:
    """Returns an example as a row of a table: its title, documents and texts with sentinels."""
    sides = {"text": sample.tokens}
    if sample.trace:
        sides |= {"inputs": sample.trace.inputs.tokens_L} if sample.trace.inputs else {}
        sides |= {"targets": sample.trace.targets.tokens_L}
    return {
        "example": sample.title,
        "documents": ", ".join(part.id for part in sample.parts),
        **{side: spelled(tokens.tolist(), ids) for side, tokens in sides.items()},
    }
