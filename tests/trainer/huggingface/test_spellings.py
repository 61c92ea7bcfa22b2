"""Fields of a config.json with two spellings: read as transformers reads them, or refused."""

import contextlib
import json

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.huggingface.random_shapes import YARN, Theirs
from trainer.huggingface import load, model_config, parity

pytestmark = pytest.mark.torch

LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ORIGINAL = "original_max_position_embeddings"
SCALED = {name: value for name, value in YARN.items() if name != "rope_theta"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Theirs(name, tmp_path_factory.mktemp("theirs"))
        return made[name]

    return get


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
        ("qwen3", {"rope_scaling": SCALED, "rope_parameters": DEFAULT}),
        ("qwen3", {"rope_scaling": {**LINEAR, "rope_theta": 500.0}, "rope_parameters": None}),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": DEFAULT}),
        ("qwen2", {"rope_scaling": DEFAULT, "rope_parameters": YARN}),
        ("qwen3, yarn", {"rope_parameters": {**YARN, ORIGINAL: None}, ORIGINAL: None}),
        ("mistral", {"rope_scaling": None, "attention_bias": False}),
        ("gemma2", {"rope_scaling": LINEAR}),
        ("gemma2", {"hidden_act": "gelu", "hidden_activation": None}),
        ("gemma3_text", {"rope_scaling": LINEAR}),
        ("gemma3_text", {"hidden_act": "relu", "hidden_activation": None}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
        ("gemma3_text", {"_sliding_window_pattern": 2}),
        ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 6}),
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


def test_an_original_length_beside_yarn_is_read(theirs, tmp_path):
    made = theirs("qwen3, yarn")
    rope = {name: value for name, value in YARN.items() if name != ORIGINAL}
    folder, written = rewritten(made, tmp_path, {"rope_parameters": rope, ORIGINAL: 8})
    ours = model_config(folder)
    assert "original_positions=8" in ours.position
    wanted = parity.their_logits(parity.their_model(folder, written))
    found = parity.compare(parity.our_logits(ours, load(folder, ours)), wanted, [made.batch])
    assert found.holds, str(found)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {"rope_scaling": SCALED, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
            "rope_scaling replaces rope_parameters, so the base is 10000 and not 1e\\+06: move",
        ),
        ("qwen3", {"rope_parameters": {**DEFAULT, "factor": 4.0}}, "of kind default with factor"),
        ("qwen3", {"rope_scaling": {**LINEAR, "type": "yarn"}}, "rope_type linear and type yarn"),
        ("qwen3, yarn", {ORIGINAL: 7}, f"{ORIGINAL} is 7 beside rotary positions with 16"),
        ("qwen3", {ORIGINAL: 7}, f"{ORIGINAL} is 7: this field is unknown"),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type linear and type yarn",
        ),
        ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters has factor beside full_att"),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type default and type linear",
        ),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_scaling": {**SCALED, "truncate": False}},
            "truncate False, which transformers ignores",
        ),
        (
            "gemma3_text",
            {"layer_types": None, "_sliding_window_pattern": 2},
            "_sliding_window_pattern is 2; our models have 6",
        ),
        ("mistral", {"attention_bias": True}, "attention_bias is True; our models have False"),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(theirs, name, changes, message, tmp_path):
    folder, _ = rewritten(theirs(name), tmp_path, changes)
    with pytest.raises(UserError, match=message):
        model_config(folder)


# Values of other types; sizes stay small.
WRONG = ("seven", "7", 7, 0, -1, 0.5, True, [], ["x"], [1], {}, {"x": 1}, {"full_attention": 3})


@pytest.mark.parametrize("name", ["qwen3, yarn", "gemma3_text", "t5gemma2", "switch", "roberta"])
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
