"""Files of transformers beside a vocabulary: tokens that it does not have are refused."""

import json
import shutil

import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from trainer.huggingface import tokenizer

FLAGS = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
ORG = {"content": "<ORG>", **FLAGS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a SentencePiece model without sentinels, and its tokenizer.json."""
    folder = tmp_path_factory.mktemp("t5")
    lines = small_tokenizers.documents(50)
    small_tokenizers.t5(folder / "spiece", lines, 300)
    text = tokenizer.tokenizer_json(vocabulary.load(str(folder)))
    (folder / "tokenizer.json").write_text(text)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "t5")


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def add(folder, token):
    value = json.loads((folder / "tokenizer.json").read_text())
    value["added_tokens"].append(token)
    write(folder, "tokenizer.json", value)


def test_files_that_agree(folder):
    size = vocabulary.load(str(folder / "spiece.model")).size
    add(folder, {"id": size + 99, "content": "<extra_id_0>", **FLAGS, "special": True})
    tokens = {"0": {"content": "<pad>"}, str(size + 100): {"content": "[PAD]"}}
    names = ["<extra_id_0>", "</s>"]
    config = {"pad_token": "[PAD]", "added_tokens_decoder": tokens}
    write(folder, "tokenizer_config.json", {**config, "additional_special_tokens": names})
    shutil.copy(folder / "spiece.model", folder / "tokenizer.model")
    assert vocabulary.load(str(folder)).size == size
    assert vocabulary.load(str(folder), extra_ids=100).size == size + 100


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("added_tokens.json", {"<ORG>": 5000}, "<ORG> with the id 5000, unlike"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5000": ORG}}, "the id 5000, unlike"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<ORG>"]}, "token <ORG>, unlike"),
        ("special_tokens_map.json", {"extra_special_tokens": {"org_token": ORG}}, "<ORG>, unlike"),
        ("added_tokens.json", {"</s>": 7}, "which has it as 1"),
        ("added_tokens.json", {"<ORG>": 1}, "<ORG> with the id 1, unlike"),
        ("added_tokens.json", ["<ORG>"], None),
        ("added_tokens.json", "no JSON", "added_tokens.json is not JSON"),
        ("added_tokens.json", {"<ORG>": "x"}, "the tokens in .* are damaged"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": ORG}}, "are damaged"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {}}}, "are damaged"),
        ("special_tokens_map.json", {"additional_special_tokens": 3}, "are damaged"),
    ],
)
def test_a_token_that_another_file_names(name, value, says, folder):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    assert vocabulary.load(str(folder / "spiece.model"))  # named by itself
    if says is None:
        assert vocabulary.load(str(folder))
        return
    with pytest.raises(UserError, match=says):
        vocabulary.load(str(folder))
    (folder / "spiece.model").unlink()
    with pytest.raises(UserError, match=says):
        vocabulary.load(str(folder))


def test_a_token_of_the_tokenizer_alone(folder):
    size = vocabulary.load(str(folder)).size
    add(folder, {"id": size, **ORG})
    with pytest.raises(UserError, match=f"tokenizer.json has the token <ORG> with the id {size}"):
        vocabulary.load(str(folder))
    found = vocabulary.load(str(folder / "tokenizer.json"))
    assert found.encode(["an <ORG>"])[0][-1] == size


def test_two_vocabularies_in_one_folder(folder):
    value = json.loads((folder / "tokenizer.json").read_text())
    piece, score = value["model"]["vocab"][50]
    value["model"]["vocab"][50] = [f"{piece}x", score]
    write(folder, "tokenizer.json", value)
    with pytest.raises(UserError, match=f"has {piece} as id 50, but .* has {piece}x: they are two"):
        vocabulary.load(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"other")
    with pytest.raises(UserError, match=r"spiece.model and .*tokenizer.model differ"):
        vocabulary.load(str(folder))
