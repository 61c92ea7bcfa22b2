"""Files of transformers beside a vocabulary: tokens that it does not have are refused."""

import json
import re
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
    name = re.escape(piece)
    with pytest.raises(UserError, match=f"has {name} as id 50, but .* has {name}x: they are two"):
        vocabulary.load(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"other")
    with pytest.raises(UserError, match=r"spiece.model and .*tokenizer.model differ"):
        vocabulary.load(str(folder))


def lower(value):
    """Puts a step that lower-cases first into a tokenizer.json."""
    steps = [{"type": "Lowercase"}, value["normalizer"]]
    value["normalizer"] = {"type": "Sequence", "normalizers": [each for each in steps if each]}


def test_a_tokenizer_that_lower_cases_beside_a_model_that_cannot_spell_capitals(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    small_tokenizers.t5(folder / "spiece", ["the house is big and old", "a red fox"] * 9, 40)
    loaded = vocabulary.load(str(folder))
    value = json.loads(tokenizer.tokenizer_json(loaded))
    write(folder, "tokenizer.json", value)
    assert vocabulary.load(str(folder)).size == loaded.size
    lower(value)
    write(folder, "tokenizer.json", value)
    with pytest.raises(UserError, match=r"encode '[A-Z].*' differently"):
        vocabulary.load(str(folder))


@pytest.mark.parametrize(
    ("config", "is_read"),
    [
        ({"tokenizer_class": "AlbertTokenizer", "do_lower_case": True}, False),
        ({"tokenizer_class": "AlbertTokenizer"}, False),
        ({"tokenizer_class": "AlbertTokenizerFast", "do_lower_case": False}, True),
        ({"do_lower_case": True}, False),
        ({"tokenizer_class": "T5Tokenizer", "do_lower_case": True}, True),
    ],
)
def test_a_model_that_transformers_would_lower_case(folder, config, is_read):
    (folder / "tokenizer.json").unlink()
    write(folder, "tokenizer_config.json", config)
    if is_read:
        assert vocabulary.load(str(folder))
        return
    with pytest.raises(UserError, match=r"tokenizer_config.json says do_lower_case=True \("):
        vocabulary.load(str(folder))
    assert vocabulary.load(str(folder / "spiece.model"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("role", ["mask", "sep", "cls", "bos", "unk"])
def test_a_role_of_a_token_that_the_model_lacks(folder, file, role):
    write(folder, file, {f"{role}_token": "<ORG>"})
    with pytest.raises(UserError, match=f"{file} has the token <ORG>, unlike .*spiece.model"):
        vocabulary.load(str(folder))
    (folder / "spiece.model").unlink()
    says = "has the token <ORG>" if role == "mask" else "no token <ORG>, which .* names as "
    says += f"{role}_token" * (role != "mask")
    with pytest.raises(UserError, match=says):
        vocabulary.load(str(folder))


WORDS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]",
         "unk_token": "[UNK]", "tokenizer_class": "BertTokenizer"}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}, None),
        ({"do_lower_case": False}, "do_lower_case=False"),
        ({"strip_accents": False}, "strip_accents=False"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=False"),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"unk_token": "the"}, "another unknown token than the, which"),
        ({"sep_token": "<sep>"}, "no token <sep>, which .* names as sep_token"),
        ({"mask_token": "<mask>"}, "has the token <mask>"),
    ],
)
def test_settings_that_contradict_word_pieces(tmp_path, config, says):
    folder = tmp_path / "bert"
    small_tokenizers.bert(folder, ["the house is big", "a red fox"] * 9)
    write(folder, "tokenizer_config.json", WORDS | config)
    if says is None:
        assert vocabulary.load(str(folder))
        return
    with pytest.raises(UserError, match=says):
        vocabulary.load(str(folder))


@pytest.mark.parametrize(
    ("name", "is_read"), [("GPT2Tokenizer", False), ("PreTrainedTokenizerFast", True)]
)
def test_a_space_before_texts_that_another_file_asks_for(tmp_path, name, is_read):
    folder = tmp_path / "gpt2"
    small_tokenizers.gpt2(folder, ["the house is big"] * 9)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    more = {"add_prefix_space": True, "tokenizer_class": name}
    write(folder, "tokenizer_config.json", config | more)
    if is_read:
        assert vocabulary.load(str(folder))
        return
    with pytest.raises(UserError, match="says add_prefix_space=True"):
        vocabulary.load(str(folder))


@pytest.mark.parametrize("has_it", [True, False])
def test_advice_names_the_other_file_only_if_it_has_the_token(folder, has_it):
    write(folder, "tokenizer_config.json", {"bos_token": "<ORG>", "eos_token": "</s>"})
    if has_it:
        add(folder, {"id": vocabulary.load(str(folder / "spiece.model")).size, **ORG})
    with pytest.raises(UserError, match="has the token <ORG>") as raised:
        vocabulary.load(str(folder))
    advised = re.findall(r"--vocabulary=(\S+)", str(raised.value))
    names = [path.rpartition("/")[2] for path in advised]
    assert names == ["tokenizer.json", "spiece.model"][not has_it :]
    for path in advised:
        assert vocabulary.load(path)


def test_tokens_added_after_sentinels_are_not_a_matter_of_other_names(folder):
    size = vocabulary.load(str(folder / "spiece.model")).size
    for number in (2, 1, 0):
        add(folder, {"id": size + 2 - number, "content": f"<extra_id_{number}>", **FLAGS})
    assert vocabulary.load(str(folder / "tokenizer.json")).record.sentinels == 3
    add(folder, {"id": size + 3, **ORG})
    with pytest.raises(UserError, match=r"but <ORG> and perhaps others were added after them\. T"):
        vocabulary.load(str(folder / "tokenizer.json"))
