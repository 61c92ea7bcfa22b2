"""The command that each command names as the next one runs as it is printed."""

import re
import shlex

import pytest

from tests.support.processes import started

pytestmark = pytest.mark.processes


def next_of(done):
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("next: "))
    program, *words = shlex.split(line.removeprefix("next: "))
    return words if program == "python" else ["-m", program, *words]


def test_a_vocabulary_leads_to_a_report(tmp_path):
    lines = [f"line {n} of {n % 7} boats on {n % 5} seas" for n in range(3000)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    words = ["-m", "vocab.train", "--corpus=text:texts.txt", "--vocab_size=300", "--output=v"]
    built = started(*next_of(started(*words, cwd=tmp_path)), cwd=tmp_path)
    words = next_of(built)
    (steps,) = (word for word in words if re.fullmatch(r"--train_steps=\d+", word))
    words[words.index(steps)] = "--train_steps=4"  # a test has no minutes
    trained = started(*words, "--checkpoint.every_steps=4", cwd=tmp_path)
    reported = started(*next_of(trained), cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    (line,) = (line for line in reported.stdout.splitlines() if "compare checkpoints" in line)
    words = shlex.split(line[line.index("palimpsest ") :])
    compared = started("-m", *words, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "train longer" in reported.stdout
    assert "--train_steps=8" in reported.stdout
    longer = next_of(built)
    longer[longer.index(steps)] = "--train_steps=8"
    assert started(*longer, "--checkpoint.every_steps=4", cwd=tmp_path).returncode == 0
