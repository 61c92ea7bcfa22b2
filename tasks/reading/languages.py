"""Corpora in several languages, or any other parts, named by --corpus and --languages.

    --corpus='json:data/{language}/*.jsonl'                      one language per folder in data
    --corpus='hf:allenai/c4:{language}' --languages=ro,en,de     one configuration per language
    --corpus=ro=json:ro/*.jsonl --corpus=en=parquet:en/*.parquet   one SPEC per language

Names consist of letters, digits, _, - and `.`; they become part of task names.
"""

import re
from collections.abc import Mapping, Sequence

from tasks.reading import listers
from tasks.reading.corpus import CorpusSpec
from tasks.reading.listing import alternatives
from tasks.reading.spec import parse
from tasks.storage import store
from tasks.terminal.command_line import UserError

PLACE = "{language}"
_NAME = r"[A-Za-z0-9][\w.-]*"
FORMS = (
    f"give several languages as one SPEC with {PLACE} in it and --languages=A,B, or as "
    "--corpus=A=SPEC --corpus=B=SPEC"
)


def specs(texts: Sequence[str], names: str | None, unnamed: bool = False) -> dict[str, CorpusSpec]:
    """Returns the corpus of each language, in the order given, or {"": corpus} for a single corpus.

    `texts` are the values of --corpus, `names` is the value of --languages; if it is None, the
    languages are found in place of `{language}` in the SPEC. With `unnamed`, SPECs serve as names
    of several corpora. Raises UserError if a SPEC is invalid, or languages are missing or repeated.
    """
    named = [re.fullmatch(rf"({_NAME})=(.*)", text, re.DOTALL) for text in texts]
    if unnamed and len(texts) > 1 and not any(named) and names is None:
        _check_once(texts, "--corpus")
        return {text: parse(text) for text in texts}
    if any(named) or len(texts) > 1:
        if names is not None:
            raise UserError(f"--languages={names} goes with one --corpus that has {PLACE} in it")
        return _named(texts, named)
    (text,) = texts
    head, mark, options = text.partition("?")
    if PLACE not in head:
        if names is not None:
            raise UserError(f"--languages={names}: --corpus={text} has no {PLACE}; {FORMS}")
        return {"": parse(text)}
    found = _found(text, head) if names is None else [name.strip() for name in names.split(",")]
    for name in found:
        if not re.fullmatch(_NAME, name):
            raise UserError(
                f"--languages={names}: {name!r} is not a valid name: use letters, digits, "
                "_, - and ."
            )
    _check_once(found, f"--languages={names}")
    return {name: parse(f"{head.replace(PLACE, name)}{mark}{options}") for name in found}


def _named(texts: Sequence[str], named: Sequence[re.Match[str] | None]) -> dict[str, CorpusSpec]:
    for text, form in zip(texts, named, strict=True):
        if not form:
            raise UserError(f"--corpus={text} has no name, but is not the only one: {FORMS}")
        if PLACE in form[2].partition("?")[0]:
            raise UserError(f"--corpus={text} has both a name and {PLACE}: {FORMS}")
    forms = [form for form in named if form]
    _check_once([form[1] for form in forms], "--corpus")
    return {form[1]: parse(form[2]) for form in forms}


def _check_once(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where} names {name} twice: leave one out")


def _found(text: str, head: str) -> list[str]:
    """Returns the names found in place of `{language}` in `head`, a SPEC without options."""
    kind, _, location = head.partition(":")
    before, _, after = location.partition(PLACE)
    folder, _, prefix = before.rpartition("/")
    suffix, slash, _ = after.partition("/")
    lister = listers.of_kind(kind)
    if not lister.has_paths or re.search(r"[*?\[]", before + suffix) or "{" in folder:
        raise UserError(f"--corpus={text}: name its languages, for example --languages=ro,en")
    place = folder or ("/" if before.startswith("/") else ".")
    fs, path = store.filesystem(place)
    try:
        entries = fs.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"--corpus={text}: there is no folder {place}") from error
    ends: dict[bool, list[str]] = {True: [], False: []}
    for entry in entries:
        ends[entry["type"] == "directory"].append(entry["name"].rstrip("/").rpartition("/")[2])
    shown = any(end[:1] != "." for end in ends[True])
    are_folders = bool(slash) or (lister.reads_folders and not suffix and shown)
    names = _fitting(ends[are_folders], prefix, suffix)
    what = "folders" if are_folders else "files"
    if not names:
        raise UserError(f"--corpus={text}: {place} has no {what} named after languages")
    unfit = [name for name in names if not re.fullmatch(_NAME, name)]
    if unfit:
        raise UserError(
            f"--corpus={text}: {', '.join(map(repr, unfit))} in {place} cannot be language "
            f"names, which begin with an ASCII letter or a digit and consist of letters, digits, "
            f"_, - and .: rename these {what}, or name the languages to read, for example "
            f"--languages={','.join(name for name in names if name not in unfit) or 'ro,en'}"
        )
    return names


def _fitting(ends: Sequence[str], prefix: str, suffix: str) -> list[str]:
    """Returns the distinct texts between `prefix` and `suffix` in names of files or folders.

    Braces in these stand for alternatives.
    Hidden files count only if the text is a valid name.
    """
    before, after = ("|".join(map(re.escape, alternatives(each))) for each in (prefix, suffix))
    pattern = re.compile(f"(?:{before})(.+)(?:{after})", re.DOTALL)
    matches = filter(None, map(pattern.fullmatch, ends))
    return sorted(
        {each[1] for each in matches if each[0][0] != "." or re.fullmatch(_NAME, each[1])}
    )


def check(corpora: Mapping[str, CorpusSpec]) -> None:
    """Checks that every language can be read, before hours are spent on the others.

    Lists each language's files and inspects the smallest non-empty one, for example for its
    columns. Skips data sets of the Hub. Raises UserError if a language has only empty files or
    lacks a column.
    """
    for name, spec in corpora.items():
        try:
            listers.of_kind(spec.kind).check(spec)
        except UserError as error:
            if not name:
                raise
            if ":" in name:  # a corpus without a name stands for itself
                raise UserError(f"--corpus={name}: {error}") from error
            raise UserError(
                f"language {name}: {error}; use --languages to leave it out, or repair its files"
            ) from error
