"""Fields of a config.json with two spellings: read as transformers reads them, or refused."""

import contextlib
import json

import pytest

from tasks.terminal.command_line import UserError
from tests.support.cases import rows
from tests.trainer.huggingface.random_shapes import SHAPES
from trainer.huggingface import load, model_config, parity

pytestmark = pytest.mark.torch


def rewritten(made, tmp_path, changes):
    """Returns a folder with other fields; None removes one."""
    fields = {**made.written, **changes}
    fields = {name: value for name, value in fields.items() if value is not None}
    for file in made.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path), fields


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # What Qwen's model cards say to add, beside what transformers 5 writes.
        *rows("SPELLINGS")
    ],
)
def test_both_spellings_are_read_as_transformers_does(theirs, name, changes, tmp_path):
    made = theirs(name)
    changes = {
        field: {key: each for key, each in value.items() if each is not None}
        if isinstance(value, dict)
        else value
        for field, value in changes.items()
    }
    folder, written = rewritten(made, tmp_path, changes)
    ours = model_config(folder)
    wanted = parity.their_logits(parity.their_model(folder, written))
    found = parity.compare(parity.our_logits(ours, load(folder, ours)), wanted, [made.batch])
    assert found.holds, str(found)


@pytest.mark.parametrize(("name", "changes", "message"), [*rows("CONTRADICTIONS")])
def test_spellings_that_contradict_each_other_are_refused(theirs, name, changes, message, tmp_path):
    folder, _ = rewritten(theirs(name), tmp_path, changes)
    with pytest.raises(UserError, match=message):
        model_config(folder)


# Values of other types; sizes stay small.
WRONG = ("seven", "7", 7, 0, -1, 0.5, True, [], ["x"], [1], {}, {"x": 1}, {"full_attention": 3})


@pytest.mark.parametrize("name", [each for each in SHAPES if each in rows("OTHER_TYPES")])
def test_fields_of_other_types_are_refused(theirs, name, tmp_path):
    made = theirs(name)
    for field in made.written:
        if field == "model_type":
            continue
        for number, value in enumerate(WRONG):
            folder = tmp_path / f"{field} {number}"
            folder.mkdir()
            with contextlib.suppress(UserError):
                model_config(rewritten(made, folder, {field: value})[0])
