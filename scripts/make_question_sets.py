"""Makes the sets of questions that come with the package: tasks/annexes/questions/files.

    python scripts/make_question_sets.py --romanian='parquet:ro_validation.parquet'

The sentences of `agreement` are made of the words below. All other English questions are of the
documentation of Python (PSF licence), validation split; all other Romanian ones of --romanian:
the validation part of RONEC (github.com/dumitrescustefan/ronec, MIT), detokenised.
"""

import argparse
import pathlib
import random
from collections.abc import Iterator

from tasks.annexes.making_questions import making
from tasks.annexes.questions import question, sets
from tasks.annexes.questions.question import Question, of_pair

FILES = pathlib.Path("tasks/annexes/questions/files")
KINDS = ("cloze", "long_cloze", "order", "copying", "text")
COUNT = 120
LONGEST = 900  # characters of a text in a question
ENGLISH = "python_docs?split=validation"

# Singular, plural.
NOUNS = [
    ("boy", "boys"), ("teacher", "teachers"), ("dog", "dogs"), ("house", "houses"),
    ("car", "cars"), ("book", "books"), ("child", "children"), ("neighbour", "neighbours"),
    ("city", "cities"), ("road", "roads"), ("school", "schools"), ("flower", "flowers"),
    ("key", "keys"), ("woman", "women"), ("letter", "letters"), ("window", "windows"),
]  # fmt: skip
VERBS = [("is", "are"), ("was", "were"), ("has been", "have been")]
PLACES = ["near the", "behind the", "next to the", "in front of the"]
ENDS = ["here", "old", "very small", "there", "not new", "in the picture"]
THESE = [("This", "These"), ("That", "Those")]

# Definite singular and plural, indefinite singular, gender.
SUBSTANTIVE = [
    ("băiatul", "băieții", "băiat", "m"), ("profesorul", "profesorii", "profesor", "m"),
    ("câinele", "câinii", "câine", "m"), ("elevul", "elevii", "elev", "m"),
    ("copilul", "copiii", "copil", "m"), ("vecinul", "vecinii", "vecin", "m"),
    ("fata", "fetele", "fată", "f"), ("casa", "casele", "casă", "f"),
    ("mașina", "mașinile", "mașină", "f"), ("cartea", "cărțile", "carte", "f"),
    ("școala", "școlile", "școală", "f"), ("floarea", "florile", "floare", "f"),
    ("grădina", "grădinile", "grădină", "f"), ("scaunul", "scaunele", "scaun", "n"),
    ("orașul", "orașele", "oraș", "n"), ("drumul", "drumurile", "drum", "n"),
]  # fmt: skip
VERBE = [("este", "sunt"), ("era", "erau"), ("a fost", "au fost"), ("va fi", "vor fi")]
CAPETE = ["aici", "acolo", "în fotografie", "departe de sat"]
# Masculine and feminine singular, masculine and feminine plural.
ADJECTIVE = [
    ("frumos", "frumoasă", "frumoși", "frumoase"), ("mic", "mică", "mici", "mici"),
    ("bun", "bună", "buni", "bune"), ("alb", "albă", "albi", "albe"),
    ("înalt", "înaltă", "înalți", "înalte"), ("negru", "neagră", "negri", "negre"),
]  # fmt: skip


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _english(draw: random.Random) -> Iterator[Question]:
    while True:
        (noun, other), (verb, end) = draw.sample(NOUNS, 2), (draw.choice(VERBS), draw.choice(ENDS))
        place, number = draw.choice(PLACES), draw.randrange(2)
        right, wrong = verb[number], verb[1 - number]
        for group, start in (
            ("subject and verb", f"The {noun[number]}"),
            ("with a noun between", f"The {noun[number]} {place} {other[1 - number]}"),
        ):
            pair = f"{start} {right} {end}.", f"{start} {wrong} {end}."
            yield of_pair(*pair, group)
        these, was = draw.choice(THESE), ("was", "were")[number]
        pair = (f"{these[each]} {noun[number]} {was} {end}." for each in (number, 1 - number))
        yield of_pair(*pair, "determiner and noun")


def _romanian(draw: random.Random) -> Iterator[Question]:
    while True:
        noun, other = draw.sample(SUBSTANTIVE, 2)
        verb, end, number = draw.choice(VERBE), draw.choice(CAPETE), draw.randrange(2)
        right, wrong = verb[number], verb[1 - number]
        for group, start in (
            ("subject and verb", _capital(noun[number])),
            ("with a noun between", f"{_capital(noun[number])} de lângă {other[1 - number]}"),
        ):
            pair = f"{start} {right} {end}.", f"{start} {wrong} {end}."
            yield of_pair(*pair, group)
        feminine = noun[3] == "f" or (noun[3] == "n" and number == 1)
        forms, article = draw.choice(ADJECTIVE), noun[3] == "f"
        pair = (
            f"{_capital(noun[number])} {('este', 'sunt')[number]} {forms[2 * number + each]}."
            for each in (feminine, not feminine)
        )
        yield of_pair(*pair, "adjective")
        pair = (f"Am văzut {('un', 'o')[each]} {noun[2]} {end}." for each in (article, not article))
        yield of_pair(*pair, "article and noun")


def _agreement(drawn: Iterator[Question], groups: int) -> list[Question]:
    """Returns different questions, equally many of each group."""
    most, found = COUNT // groups, dict[str, list[Question]]()
    while sum(map(len, found.values())) < most * groups:
        each = next(drawn)
        own = found.setdefault(each.group, [])
        # "mici" is the plural of both genders.
        if len(own) < most and each not in own and each.choices[0] != each.choices[1]:
            own.append(each)
    return [each for own in found.values() for each in own]


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--romanian", required=True, help="SPEC of the Romanian texts")
    flags = parser.parse_args()
    made = {"english": (ENGLISH, _english, 3), "romanian": (flags.romanian, _romanian, 4)}
    for language, (spec, drawn, groups) in made.items():
        texts = [row["text"] for row in sets.rows(spec)]
        by_kind = {kind: making.make(kind, texts, COUNT, 3, seed=0) for kind in KINDS}
        by_kind["agreement"] = _agreement(drawn(random.Random(language)), groups)
        if language == "english":
            by_kind["arithmetic"] = making.make("arithmetic", texts, COUNT, 3, seed=0)
        (FILES / language).mkdir(parents=True, exist_ok=True)
        for kind, questions in by_kind.items():
            kept = [each for each in questions if len(each.before + each.after) <= LONGEST]
            question.write(str(FILES / language / f"{kind}.jsonl"), kept)
            print(language, kind, len(kept))


if __name__ == "__main__":
    main()
