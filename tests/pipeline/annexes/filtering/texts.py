"""Texts to compare filters on: real documents, and odd ones."""

import os
import pathlib
import random
import sysconfig

from pyarrow import parquet

from tasks.reading import stdlib_docs

ODD = [
    "", " ", "\n", "\n\n\n", "x", "a" * 2000, ".", "...", "…", ". . .", "a...", "a ...\n", "{", "#",
    "日本語のテキストです。改行\nもあります。", "中文没有空格" * 40, "ไม่มีช่องว่าง", "a\x00b\x01\x7fc",
    "\u00a0\u2003x\u3000", "a\r\nb\r\n\r\nc", "\u2028line\u2029paragraph\x85next\x0bv\x0cf\x1cs",
    "👩‍👩‍👧‍👦 🇷🇴 e\u0301", "\ufffd\ufffd", "İSTANBUL ß ŉ", "The\u0301 the THE (the) 'the'",
    "- one\n- two\n• three\n* four", "same line\nsame line\nsame line\n\nsame line\nsame line\n",
    "para\none\n\npara\none\n \npara\none", "a b a b a b a b a b a b", "one two three " * 30,
    "He said \"no.\" She left! Did she?! (Yes.) etc.", "a.) b.. c?\" d", "no end",
    "end.\"", "end.”",
    "This line has a very nice citation[1] in it[citation needed].\nLorem IPSUM is here, you see.",
    "We use cookies and so on, dear reader.\nPlease enable JavaScript to see this page.\n"
    "This good line stays in the text.\nWait for the end of it...",
    "w" * 1001 + " is a long word here.",
    "write to a.b+c@mail.example.org, x@y or 8.8.8.8 and 10.0.0.1, 1.2.3.4.5, 256.1.1.1, v1.2.3.4",
    "a@b.co.@c.de @ [ 08.8.8.8 8.8.8.8. 8.8.8.8:80", "Αθήνα москва Москва ＡＢＣ ｶﾅ", "١٢٣ 123 ²",
    "damn phrase! Two words, Damn\u0103 two  words", "x_damn_x", "Two words",
]  # fmt: skip


def real(count: int) -> list[str]:
    """Returns documents from the folder PALIMPSEST_CORPORA, if set, and Python's library."""
    found: list[str] = []
    corpora = os.environ.get("PALIMPSEST_CORPORA")
    for path in sorted(pathlib.Path(corpora).glob("*.parquet")) if corpora else ():
        found += parquet.read_table(path, columns=["text"]).column("text").to_pylist()
    found += stdlib_docs.documents().values()
    folder = pathlib.Path(sysconfig.get_paths()["purelib"])
    for path in sorted(folder.rglob("*.py")) if len(found) < count else ():
        if len(found) >= count:
            break
        if path.stat().st_size < 100_000:
            found.append(path.read_text(errors="replace"))
    return found[:count]


def random_texts(count: int, seed: int) -> list[str]:
    """Returns short texts of few words and lines, so that everything is repeated."""
    generator = random.Random(seed)
    words = ["the", "The", "of", "a", "bb", "x.", "y!", "-", "•", "#", "...", "…", "{", "é", "1"]
    words.append("日本")
    ends = [" ", " ", " ", "\n", "\n\n", "  ", "\t", ".\n", "...\n", "\u2003"]
    return [
        "".join(
            generator.choice(words) + generator.choice(ends)
            for _ in range(generator.randrange(0, 80))
        )
        for _ in range(count)
    ]
