"""Reports on a vocabulary, of several corpora side by side."""

import pytest

from tasks.terminal.command_line import UserError
from tests.vocab.test_fit import folder as folder
from vocab.annexes.reporting_vocabularies import report


def test_corpora_are_shown_side_by_side(folder, capsys):
    specs = [f"json:{folder}/{name}.jsonl?validation=0.0" for name in "ab"]
    report.main([f"--vocabulary={folder}/vocabulary", *(f"--corpus={spec}" for spec in specs)])
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert "sha256" in first
    assert head.split() == specs
    (words,) = [line for line in lines if line.startswith("  tokens a word")]
    assert len(words.split()) == 5
    (coverage,) = [line for line in lines if line.startswith("  characters covered")]
    assert coverage.split()[2:] == ["100.0000%", f"{30 / 91:.4%}"]
    assert [line.split()[0] for line in lines if line.startswith("  Latin")] == ["Latin"] * 2
    with pytest.raises(UserError, match="no vocabulary at"):
        report.main([f"--vocabulary={folder}", f"--corpus={specs[0]}"])
