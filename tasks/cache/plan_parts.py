"""Checks of the parts of a plan that other modules define: its vocabulary and its corpus."""

import dataclasses
from typing import Any

from tasks.cache.checked_json import check_count, check_form, check_keys, wrong
from tasks.vocabulary import VOCABULARY_FILES, SpecialIds, VocabularyRecord

_KEYS = frozenset(each.name for each in dataclasses.fields(VocabularyRecord))


def vocabulary_from_dict(value: Any) -> VocabularyRecord:
    """Inverse of dataclasses.asdict; raises a UserError if the record was damaged or edited."""
    more = frozenset({"file", "special"})
    check_keys(value, "vocabulary", _KEYS - more, more)
    if value.get("file") not in (None, *VOCABULARY_FILES):
        raise wrong("vocabulary.file", value["file"], "one of " + ", ".join(VOCABULARY_FILES))
    special = value.get("special")
    if special is not None:
        roles = {each.name for each in dataclasses.fields(SpecialIds)}
        check_keys(special, "vocabulary.special", {"eos"}, roles)
        for role, number in special.items():
            check_count(number, f"vocabulary.special.{role}")
        special = SpecialIds(**{**dict.fromkeys(roles), **special})
    check_form(value["sha256"], str, "vocabulary.sha256", "a checksum")
    for name in ("pieces", "extra_ids", "sentinels"):
        check_count(value[name], f"vocabulary.{name}")
    return VocabularyRecord(**{**value, "special": special})


def check_corpus(corpus: dict[str, Any]) -> None:
    """Checks what is read of a corpus's record; raises a UserError."""
    names = corpus.get("files", [])
    check_form(corpus.get("spec", ""), str, "corpus.spec", "a corpus SPEC")
    for file in check_form(names, list, "corpus.files", "a list of files"):
        if not (isinstance(file, dict) and isinstance(file.get("name"), str)):
            raise wrong("corpus.files", file, "files with a name each")
    ends = corpus.get("generations", [len(names)])
    for count in check_form(ends, list, "corpus.generations", "a list of counts"):
        check_count(count, "corpus.generations")
    if sum(ends) != len(names):
        raise wrong("corpus.generations", ends, f"counts of {len(names):,} files in all")
