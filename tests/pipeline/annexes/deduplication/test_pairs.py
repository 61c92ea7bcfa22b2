"""Lists of duplicates beside caches of pairs."""

import pytest

from pipeline import verify as command
from pipeline.annexes.deduplication import dedup
from pipeline.verification.cache import verify
from tasks.terminal import foreign_flags
from tasks.terminal.command_line import UserError
from tests.pipeline.building.test_pairs import make as make
from tests.pipeline.building.test_pairs import rows as rows
from tests.support.corpora import write_json


def test_a_list_of_paragraphs_is_refused(make, tmp_path):
    notice = "one two three four five six seven eight nine"
    texts = write_json(tmp_path / "texts.jsonl", dict.fromkeys("ab", notice))
    dedup.main([f"--corpus={texts}", f"--output={tmp_path}/out", "--unit=paragraph"])
    cache = make()
    with pytest.raises(UserError, match=r"exclude.arrow has paragraphs, but the corpus has pairs"):
        make(f"--exclude={tmp_path}/out/exclude.arrow")
    assert verify(str(cache))[1] == []
    with pytest.raises(UserError, match=r"exclude.arrow has paragraphs, but the corpus has pairs"):
        command.main([f"--cache={cache}", f"--exclude={tmp_path}/out/exclude.arrow"])


def test_flags_of_other_programs_get_an_answer():
    assert "--min_similarity?" in foreign_flags.hint("--threshold", ["min_similarity"])
