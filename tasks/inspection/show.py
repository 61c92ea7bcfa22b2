"""Windows, and what objectives make of them, for the eye: in a terminal and as one HTML page.

A span has one colour wherever it is: in the window, its sentinel in the inputs, its sentinel and
text in the targets. The page needs no network; what its script adds is comfort.
"""

import dataclasses
import html
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tasks.cache.lineage import Part
from tasks.cache.windows import Place
from tasks.inspection.decode import REPLACEMENT, decode, is_text, piece, texts
from tasks.inspection.trace import SHUFFLED_PARTS, Side, Trace
from tasks.objectives import Lengths
from tasks.vocabulary import EOS_ID, TokenIds

COLOURS = 8
# xterm's colours, light enough for black text.
_TERMINAL = (217, 157, 153, 222, 183, 123, 215, 219)
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A window to show.

    Attributes:
      title: what it is called.
      facts: names and values, printed as they are.
      place: where it lies.
      parts: whose tokens they are.
      corpus: the SPEC of the corpus.
      tokens: int32[N] the window.
      trace: what the objective made of it, None without one.
      lengths: the positions that the features have.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    place: Place
    parts: tuple[Part, ...]
    corpus: str
    tokens: np.ndarray
    trace: Trace | None
    lengths: Lengths

    def text(self, part: Part, ids: TokenIds) -> str:
        """Returns the text of a document's part in the window."""
        return decode(self.tokens[part.position : part.position + part.tokens].tolist(), ids)


@dataclasses.dataclass(frozen=True)
class Token:
    """A token to show.

    Attributes:
      id, piece: as the vocabulary has it.
      text: what it adds to the text, printable.
      mark: whether it is a sign, not text: EOS, a sentinel, a mode token.
      own: whether the objective put it there.
      span: the number of its span, -1 for none.
      place: where in the window it stands, -1 if nowhere.
      used: whether it is in the example.
      note: the text that it stands for.
      label: what begins here.
    """

    id: int
    piece: str
    text: str
    mark: bool
    own: bool
    span: int
    place: int
    used: bool = True
    note: str = ""
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Strip:
    """One sequence to show: a heading, what is to be said of it, how full it is (None: no matter),
    and its tokens, in blocks with a heading each."""

    name: str
    note: str
    filled: float | None
    blocks: tuple[tuple[str, tuple[Token, ...]], ...]


def features(trace: Trace) -> list[tuple[str, str]]:
    """Returns what an example's further features say, as facts."""
    said = {
        "prefix": lambda values: f"{int(values.sum()):,} positions seen in both directions",
        "order": lambda values: "changed" if values[0] else "as in the text",
        "segments": lambda values: (
            f"{int((values == 1).sum()):,} and {int((values == 2).sum()):,} positions"
        ),
    }
    return [
        (name, said[name](values) if name in said else f"{len(values):,} values")
        for name, values in trace.more.items()
    ]


def extent(part: Part) -> str:
    """Returns which tokens of the document a part is."""
    end = part.first + part.tokens
    if not part.first and end == part.whole:
        return f"all {part.whole:,} tokens"
    of = "" if part.whole is None else f" of {part.whole:,}"
    return f"tokens {part.first:,} to {end:,}{of}"


def location(place: Place) -> str:
    """Returns in which shard, row and position a window begins."""
    return f"{place.path.rpartition('/')[2]}, row {place.row:,}, from token {place.position:,}"


def strips(sample: Sample, ids: TokenIds) -> list[Strip]:
    """Returns the window, by documents, and the features made of it."""
    trace = sample.trace
    side = trace.window if trace else _plain(sample.tokens)
    used_N = trace.used_N if trace else np.ones(len(sample.tokens), bool)
    tokens = _tokens(side, ids, side, used_N)
    blocks = [
        (_heading(number, part), tokens[part.position : part.position + part.tokens])
        for number, part in enumerate(sample.parts, 1)
    ]
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
        made = _tokens(feature, ids, trace.window, np.ones(len(sample.tokens), bool))
        if "segments" in trace.more and name == "inputs":
            made = _with_segments(made, trace.more["segments"])
        note = f"{len(made):,} of {length:,} positions, {_padding(length - len(made), length)}"
        note += _replacements(trace, made) if name == "inputs" else _learned(trace)
        found.append(Strip(name, note, len(made) / length, (("", _trimmed(made)),)))
    return found


def _heading(number: int, part: Part) -> str:
    # An id that Palimpsest made names the file itself.
    file = "" if part.id.startswith(part.file) else f", {part.file}"
    return f"{number} \u00b7 {part.id}{file} \u00b7 {extent(part)}"


def _trimmed(made: tuple[Token, ...]) -> tuple[Token, ...]:
    """Without the space of a block's first word."""
    first = dataclasses.replace(made[0], text=made[0].text.removeprefix(" "))
    return (first, *made[1:])


def _plain(tokens_N: np.ndarray) -> Side:
    return Side(tokens_N, np.arange(len(tokens_N)), np.full(len(tokens_N), -1))


def _padding(missing: int, length: int) -> str:
    return f"{missing / length:.1%} padding" if missing else "no padding"


def _window_note(sample: Sample) -> str:
    parts = len(sample.parts)
    note = f"{len(sample.tokens):,} tokens of {parts:,} document{'s' if parts > 1 else ''}"
    trace = sample.trace
    if not trace:
        return note
    if not trace.exact:
        return f"{note}; where the example's tokens come from is not known for this objective"
    if trace.shuffled:
        return f"{note}; the inputs are in another order, a colour is one of {SHUFFLED_PARTS} parts"
    unused = int((~trace.used_N).sum())
    spans = int(trace.window.spans_L.max(initial=-1)) + 1
    coloured = int((trace.window.spans_L >= 0).sum())
    if spans:
        note += f"; {coloured:,} to be learned, in {spans:,} span{'s' if spans > 1 else ''}"
    return f"{note}; {unused:,} not used this time" if unused else note


def _learned(trace: Trace) -> str:
    if trace.weights_L is None:
        return ", all in the loss"
    return f", {int(trace.weights_L.sum()):,} in the loss"


def _replacements(trace: Trace, made: Sequence[Token]) -> str:
    """How the inputs hide what is to be learned, where that is more than a sentinel a span."""
    stand = [token for token in made if token.own and token.span >= 0]
    pieces = sum(not token.mark for token in stand)
    marks = sorted({token.piece for token in stand if token.mark})
    kept = sum(not token.own and token.span >= 0 for token in made)
    if trace.shuffled or not stand or (len(marks) > 1 and not pieces and not kept):
        return ""
    said = [f"{len(stand) - pieces:,} by {' '.join(marks)}"] if marks else []
    said += [f"{pieces:,} by random pieces"] if pieces else []
    said += [f"{kept:,} not at all"] if kept else []
    return f"; tokens are hidden: {', '.join(said)}"


def _tokens(side: Side, ids: TokenIds, window: Side, used_N: np.ndarray) -> tuple[Token, ...]:
    numbers = side.tokens_L.tolist()
    made = []
    for token, text, place, span in zip(
        numbers, texts(numbers, ids), side.places_L.tolist(), side.spans_L.tolist(), strict=True
    ):
        name = piece(token, ids)
        mark = not is_text(token, ids)
        own = place < 0 and token != EOS_ID
        note = ""
        if own and span >= 0:
            note = decode(window.tokens_L[window.spans_L == span].tolist(), ids)
        shown = "EOS" if token == EOS_ID else name if mark or text == REPLACEMENT else text
        made.append(
            Token(
                token, printable(name), printable(shown), mark, own, span, place,
                bool(used_N[place]) if place >= 0 else True, printable(note),
            )
        )  # fmt: skip
    return tuple(made)


def _with_segments(made: tuple[Token, ...], segments_L: np.ndarray) -> tuple[Token, ...]:
    before = [0, *segments_L[:-1].tolist()]
    return tuple(
        dataclasses.replace(token, label=f"segment {now}") if now != then else token
        for token, now, then in zip(made, segments_L.tolist(), before, strict=True)
    )


def printable(text: str) -> str:
    """Returns text in which control characters, which may command a terminal, are pictures."""
    return "".join(_PICTURES.get(letter, letter) for letter in text)


_PICTURES = {
    **{chr(code): chr(0x2400 + code) for code in range(32)},
    **{chr(code): REPLACEMENT for code in range(0x80, 0xA0)},
    "\x7f": "\u2421",
    "\n": "\u21b5\n",
    "\t": "\t",
}


def _runs(made: Sequence[Token]) -> Iterator[tuple[int, list[Token]]]:
    """Yields (span, tokens) of neighbours of one span, a sign or label alone."""

    def kind(numbered: tuple[int, Token]) -> tuple:
        number, token = numbered
        alone = number if token.mark or token.label else -1
        return token.span, token.used, token.own, alone

    for _, group in itertools.groupby(enumerate(made), kind):
        tokens = [token for _, token in group]
        yield tokens[0].span, tokens


# ---- the terminal


def print_samples(samples: Sequence[Sample], ids: TokenIds) -> None:
    """Prints samples, in colours on a terminal; elsewhere spans stand in numbered brackets."""
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


def _line(made: Sequence[Token], plain: bool):
    from rich.text import Text

    line = Text()
    before = -1  # the span that the sign before stands for
    for span, tokens in _runs(made):
        text = "".join(token.text for token in tokens)
        first = tokens[0]
        if first.label:
            line.append(f"[{first.label}] ", style="cyan")
        style = "" if first.used else "dim"
        if span >= 0:
            style = f"black on color({_TERMINAL[span % COLOURS]})" + " bold" * first.mark
        elif first.mark:
            style = "cyan"
        if first.mark:
            line.append(" " if line.plain[-1:].strip() else "")
            text = f"⟨{text}⟩" if text == "EOS" else text
        # The colour begins with the word; a space alone has it too.
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
    return [*sample.facts, ("corpus", sample.corpus), ("place", location(sample.place))]


# ---- the page


def page(title: str, samples: Sequence[Sample], ids: TokenIds) -> str:
    """Returns one HTML page that shows the samples."""
    made = [(f"s{number}", sample) for number, sample in enumerate(samples, 1)]
    links = "".join(f"<li><a href='#{key}'>{_text(each.title)}</a></li>" for key, each in made)
    body = "".join(_article(key, each, ids) for key, each in made)
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{_text(title)}</title><style>{_STYLE}{_hues()}</style></head><body>"
        f"<header><h1>{_text(title)}</h1>"
        f"<nav aria-label=Windows><ul>{links}</ul></nav>{_LEGEND}</header>"
        "<input type=checkbox id=pieces><label for=pieces>pieces and ids</label>"
        f"<main>{body}</main><output id=about></output><script>{_SCRIPT}</script></body></html>\n"
    )


_LEGEND = (
    "<p class=legend><span class='s c0'>A span</span> has one colour everywhere: in the window, "
    "its <bdi class='m c0'>sign</bdi> in the inputs, its text in the targets. "
    "<span class=unused>Faint text</span> is not in the example; "
    "<span class='s o c2'>underlined by waves</span>, put there in its place. "
    "Point at a token, or touch it, to see its piece and id.</p>"
)


def _article(key: str, sample: Sample, ids: TokenIds) -> str:
    facts = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in _facts(sample)
    )
    found = strips(sample, ids)
    shown = "".join(_strip(strip) for strip in found)
    lengths = [sum(len(made) for _, made in strip.blocks) for strip in found[1:]]
    even = " even" if len(lengths) == 2 and lengths[1] > lengths[0] / 2 else ""
    return (
        f"<article id={key}><h2>{_text(sample.title)}</h2><dl>{facts}</dl>"
        f"<div class='strips{even}'>{shown}</div></article>"
    )


def _strip(strip: Strip) -> str:
    bar = ""
    if strip.filled is not None:
        bar = f"<div class=bar><div style='width:{100 * strip.filled:.1f}%'></div></div>"
    blocks = "".join(
        (f"<h4>{_text(heading)}</h4>" if heading else "")
        + f"<div class=text dir=auto>{_html(made)}</div>"
        for heading, made in strip.blocks
    )
    return (
        f"<section class={strip.name}><h3>{strip.name.capitalize()}</h3>"
        f"<p class=note>{_text(strip.note)}</p>{bar}{blocks}</section>"
    )


def _html(made: Sequence[Token]) -> str:
    out = []
    for span, tokens in _runs(made):
        first = tokens[0]
        if first.label:
            out.append(f"<bdi class=label>{_text(first.label)}</bdi>")
        colour = f" c{span % COLOURS}" if span >= 0 else ""
        number = f" data-s={span}" if span >= 0 else ""
        if first.mark:
            # An isolate, so that the letters of a sentinel do not decide the text's direction.
            kind = "e" if first.id == EOS_ID else "m"
            # A line may end before it, though no space is there.
            out.append(
                f"<wbr><bdi class='{kind}{colour}'{number}>{_token(first, first.text)}</bdi>"
            )
            continue
        inner = [_token(token, token.text) for token in tokens]
        if span >= 0 and first.text.startswith(" ") and first.text.strip():
            # The colour begins with the word; a space alone has it too.
            out.append(" ")
            inner[0] = _token(first, first.text[1:])
        joined = "".join(inner)
        classes = ("s" if span >= 0 else "") + " o" * first.own + " unused" * (not first.used)
        classes = (classes + colour).strip()
        out.append(f"<span class='{classes}'{number}>{joined}</span>" if classes else joined)
    return "".join(out)


def _token(token: Token, text: str) -> str:
    note = f" data-n={_quoted(token.note)}" if token.note else ""
    place = f" data-w={token.place}" if token.place >= 0 else ""
    return f"<i data-p={_quoted(token.piece)} data-i={token.id}{place}{note}>{_text(text)}</i>"


def _quoted(text: str) -> str:
    return f'"{html.escape(text, quote=True)}"'


def _text(value: object) -> str:
    """Escapes; characters that HTML forbids become pictures of themselves."""
    return html.escape(printable(str(value)))


def _hues() -> str:
    hues = (25, 150, 255, 85, 310, 200, 55, 350)
    return "".join(f".c{number}{{--h:{hue}}}" for number, hue in enumerate(hues))


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #4a5568; --line: #dfe5ee;
  --paper: #fff; --card: #f8fafc; --accent: #1a56a8; --l: .915; --c: .075; --ml: .52; --mc: .15;
  --mark: #fff; --faint: #8a94a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --soft: #9aa7b8; --line: #2c3542;
  --paper: #12161c; --card: #191f27; --accent: #8ab8f5; --l: .39; --c: .085; --ml: .78; --mc: .12;
  --mark: #10141a; --faint: #66717f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 6rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0 0 .75rem; font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 1.25rem; }
h3 { display: inline; margin: 0; font-size: 1rem; }
h4 { margin: .75rem 0 .25rem; padding-left: .5rem; border-left: 3px solid var(--accent);
  color: var(--accent); font-size: .8125rem; font-weight: 600; overflow-wrap: anywhere; }
a { color: var(--accent); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0; padding: 0;
  list-style: none; }
.legend, .note { color: var(--soft); font-size: .875rem; }
.legend { max-width: 48rem; margin: 1rem 0; line-height: 1.75; }
.note { display: inline; margin: 0 0 0 .5rem; }
#pieces { accent-color: var(--accent); width: 1.05rem; height: 1.05rem; vertical-align: -.15rem; }
label[for=pieces] { margin-left: .4rem; }
article { margin-top: 2rem; padding-top: 1.5rem; border-top: 1px solid var(--line); }
dl { display: flex; flex-wrap: wrap; gap: .25rem 2rem; margin: .5rem 0; font-size: .875rem; }
dl div { min-width: 0; }
dt { display: inline; color: var(--soft); margin-right: .4rem; }
dd { display: inline; margin: 0; overflow-wrap: anywhere; }
.strips { display: grid; margin-top: 1rem; gap: 1.25rem;
  grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
.even { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.window, .inputs:last-child, .window + .targets { grid-column: 1 / -1; }
section { padding: .875rem 1rem; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
.text { margin-top: .375rem; line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; }
.bar { height: 3px; margin: .5rem 0; border-radius: 2px; background: var(--line); }
.bar div { height: 100%; border-radius: 2px; background: var(--accent); }
i { font-style: normal; }
.s { padding: .1em 0; border-radius: 3px; background: oklch(var(--l) var(--c) var(--h)); }
.m, .e, .label { margin: 0 .15em; padding: .1em .35em; border-radius: 3px; white-space: nowrap;
  font: .75em/1.4 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
.m { background: var(--soft); color: var(--paper); }
.m[class*=' c'] { background: oklch(var(--ml) var(--mc) var(--h)); color: var(--mark); }
.e, .label { border: 1px solid var(--soft); color: var(--soft); }
.label { border-color: var(--accent); color: var(--accent); }
.o { text-decoration: underline wavy 1px; text-underline-offset: .2em; }
.unused { color: var(--faint); }
.lit { outline: 2px solid var(--ink); outline-offset: 1px; }
i.lit { border-radius: 2px; outline-width: 1px; }
#about { position: fixed; inset: auto 0 0; padding: .6rem 1.25rem; overflow-wrap: anywhere;
  border-top: 1px solid var(--line); background: var(--card); font-size: .9375rem; }
#about:empty { display: none; }
#pieces:checked ~ main .text { line-height: 1.5; }
#pieces:checked ~ main i { display: inline-block; margin: 0 1px 3px; padding: 1px 3px;
  border: 1px solid var(--line); border-radius: 3px; font-size: 0; text-align: center;
  vertical-align: top; white-space: pre-wrap; }
#pieces:checked ~ main i::before { content: attr(data-p); display: block; font-size: .875rem; }
#pieces:checked ~ main i::after { content: attr(data-i); display: block; font-size: .6875rem;
  opacity: .7; font-variant-numeric: tabular-nums; }
@media (max-width: 44rem) { body { padding: 1.25rem .75rem 6rem; }
  .strips, .even { grid-template-columns: minmax(0, 1fr); gap: .75rem; }
  section { padding: .75rem; }
  .note { display: block; margin: 0; } h3 { display: block; } }
@media print { #pieces, label[for=pieces], #about { display: none; } }
"""

# Points out a span wherever it is, and says what a token is.
_SCRIPT = """
const about = document.getElementById('about');
function point(event) {
  document.querySelectorAll('.lit').forEach(each => each.classList.remove('lit'));
  const token = event.target.closest('i[data-p]');
  if (!token) { about.textContent = ''; return; }
  const data = token.dataset, said = [data.p, 'id ' + data.i];
  if (data.w) said.push('token ' + data.w + ' of the window');
  if (data.n) said.push('stands for: ' + data.n);
  about.textContent = said.join(' \\u00b7 ');
  const span = token.closest('[data-s]');
  if (span) token.closest('article').querySelectorAll('[data-s="' + span.dataset.s + '"]')
    .forEach(each => each.classList.add('lit'));
  else token.classList.add('lit');
}
document.addEventListener('mouseover', point);
document.addEventListener('click', point);
"""
