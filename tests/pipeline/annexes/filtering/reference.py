"""The rules of filters in plain Python, one text at a time, written from their description."""

import ipaddress
import re
import unicodedata
from collections import Counter

CLOSING = "\"'”’)]"


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def paragraphs_of(text: str) -> list[tuple[str, ...]]:
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line.strip())
        else:
            found.append([])
    return [tuple(paragraph) for paragraph in found if paragraph]


def folded(word: str) -> str:
    while word and not word[0].isalnum():
        word = word[1:]
    while word and not word[-1].isalnum():
        word = word[:-1]
    return "".join(each.lower() if len(each.lower()) == 1 else each for each in word)


def sentences(text: str) -> int:
    count = 0
    for line in text.split("\n"):
        rest = 0
        for mark in re.finditer(rf"[.!?]+[{re.escape(CLOSING)}.!?]*(?=\s|$)", line):
            count += 1
            rest = mark.end()
        count += bool(line[rest:].strip())
    return count


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0


def repeated(items: list) -> list:
    seen, found = set(), []
    for item in items:
        if item in seen:
            found.append(item)
        seen.add(item)
    return found


def grams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]


def top(words: list[str], size: int) -> float:
    counts = Counter(grams(words, size))
    most = max(counts.values(), default=0)
    if most < 2:
        return 0
    longest = max(len("".join(gram)) for gram, count in counts.items() if count == most)
    return share(most * longest, len("".join(words)))


def covered(words: list[str], size: int) -> float:
    seen, marked = set(), set()
    for at, gram in enumerate(grams(words, size)):
        if gram in seen:
            marked.update(range(at, at + size))
        seen.add(gram)
    return share(sum(len(words[at]) for at in marked), len("".join(words)))


def is_of_script(letter: str, scripts: list[str]) -> bool:
    name = unicodedata.name(letter, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    script = name.split(" ")[0].lower()
    return {"cjk": "han", "ideographic": "han"}.get(script, script) in scripts


def of_lines(text: str, holds) -> float:
    lines = lines_of(text)
    return share(sum(map(holds, lines)), len(lines))


def of_characters(text: str, holds) -> float:
    return share(sum(map(holds, text)), len(text))


MEASURES = {
    "characters": lambda text, _: len(text),
    "words": lambda text, _: len(text.split()),
    "sentences": lambda text, _: sentences(text),
    "lines": lambda text, _: len(lines_of(text)),
    "braces": lambda text, _: text.count("{"),
    "mean_word": lambda text, _: share(len("".join(text.split())), len(text.split())),
    "mean_line": lambda text, _: share(sum(map(len, lines_of(text))), len(lines_of(text))),
    "longest_line": lambda text, _: max(map(len, lines_of(text)), default=0),
    "hashes": lambda text, _: share(text.count("#"), len(text.split())),
    "ellipses": lambda text, _: share(text.count("...") + text.count("…"), len(text.split())),
    "alphabetic_words": lambda text, _: share(
        sum(any(map(str.isalpha, word)) for word in text.split()), len(text.split())
    ),
    "stop_words": lambda text, settings: len(
        set(map(folded, text.split())) & set(settings["stop_words"])
    ),
    "bullet_lines": lambda text, settings: of_lines(text, lambda x: x[0] in settings["bullets"]),
    "ellipsis_lines": lambda text, _: of_lines(text, lambda x: x.endswith(("...", "…"))),
    "punctuated_lines": lambda text, _: of_lines(
        text, lambda x: unicodedata.category(x[-1])[0] == "P"
    ),
    "short_lines": lambda text, settings: of_lines(
        text, lambda x: len(x) < settings["short_line_characters"]
    ),
    "duplicate_lines": lambda text, _: share(len(repeated(lines_of(text))), len(lines_of(text))),
    "duplicate_line_characters": lambda text, _: share(
        len("".join(repeated(lines_of(text)))), len("".join(lines_of(text)))
    ),
    "duplicate_paragraphs": lambda text, _: share(
        len(repeated(paragraphs_of(text))), len(paragraphs_of(text))
    ),
    "duplicate_paragraph_characters": lambda text, _: share(
        sum(len("".join(each)) for each in repeated(paragraphs_of(text))),
        len("".join(lines_of(text))),
    ),
    **{f"top_{n}": lambda text, _, n=n: top(text.split(), n) for n in (2, 3, 4)},
    **{f"repeated_{n}": lambda text, _, n=n: covered(text.split(), n) for n in range(5, 11)},
    "letters": lambda text, _: of_characters(text, str.isalpha),
    "digits": lambda text, _: of_characters(text, str.isdigit),
    "spaces": lambda text, _: of_characters(text, str.isspace),
    "punctuation": lambda text, _: of_characters(text, lambda x: unicodedata.category(x)[0] == "P"),
    "controls": lambda text, _: of_characters(
        text, lambda x: x == "\ufffd" or (unicodedata.category(x) == "Cc" and not x.isspace())
    ),
    "uppercase": lambda text, _: share(
        sum(map(str.isupper, text)), sum(map(str.isalpha, text))
    ),
    "script_letters": lambda text, settings: share(
        sum(is_of_script(each, settings["scripts"]) for each in text if each.isalpha()),
        sum(map(str.isalpha, text)),
    ),
}  # fmt: skip


def c4(text: str, settings: dict) -> str:
    if settings["remove_citations"]:
        text = re.sub(r"\[[0-9]*\]|\[edit\]|\[citation needed\]", "", text)
    kept = []
    for line in lines_of(text):
        if settings["end_marks"] and (
            line[-1] not in settings["end_marks"] or line.endswith(("...", "…"))
        ):
            continue
        words = line.split()
        if len(words) < settings["min_line_words"]:
            continue
        if any(len(word) > settings["max_word_characters"] for word in words):
            continue
        phrases = map(re.escape, settings["line_phrases"])
        if settings["line_phrases"] and re.search("|".join(phrases), line, re.I | re.A):
            continue
        kept.append(line)
    return "\n".join(kept)


def pii(text: str, settings: dict) -> str:
    if settings["emails"]:
        label = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
        pattern = rf"[A-Za-z0-9._%+-]+@(?:{label}\.)+[A-Za-z]{{2,}}"
        text = re.sub(pattern, lambda _: settings["emails"], text)
    if settings["ips"]:

        def mask(found: re.Match) -> str:
            try:
                public = ipaddress.ip_address(found[0]).is_global
            except ValueError:
                return found[0]
            return settings["ips"] if public else found[0]

        number = r"[0-9]{1,3}"
        pattern = (
            rf"(?<![A-Za-z0-9_.]){number}\.{number}\.{number}\.{number}(?![A-Za-z0-9_]|\.[0-9])"
        )
        text = re.sub(pattern, mask, text)
    return text


def edited(text: str, records) -> str:
    for record in records:
        if record.name == "c4":
            text = c4(text, record.settings)
        elif record.name == "pii":
            text = pii(text, record.settings)
        elif record.name == "replace":
            text = re.sub(record.settings["pattern"], record.settings["replacement"], text)
    return text


def has_word(text: str, word: str) -> bool:
    def bounds(place: int) -> bool:
        if not 0 <= place < len(text):
            return True
        return text[place] != "_" and unicodedata.category(text[place])[0] not in "LMN"

    places = [each.start() for each in re.finditer(f"(?={re.escape(word)})", text, re.I)]
    return any(bounds(place - 1) and bounds(place + len(word)) for place in places)


def reasons(text: str, record) -> list[str]:
    """Returns the names of the rules of a set that drop an edited text."""
    found = []
    settings = record.settings
    for key, threshold in settings.items():
        kind, _, name = key.partition("_")
        if kind not in ("min", "max") or name not in MEASURES or threshold is None:
            continue
        value = MEASURES[name](text, settings)
        is_out = value < threshold if kind == "min" else value > threshold
        if is_out or (record.name == "fineweb" and value == threshold):
            found.append(key)
    phrases = settings.get("page_phrases") or []
    if any(re.search(re.escape(phrase), text, re.I | re.A) for phrase in phrases):
        found.append("page_phrases")
    if any(has_word(text, word) for word in settings.get("words") or ()):
        found.append("words")
    if record.name == "regex" and bool(re.search(settings["pattern"], text)) != settings["wanted"]:
        found.append("pattern")
    return found
