"""Models cut to the pieces of a language: rows, logits and tokenizer."""

import json

import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers
from tests.support.corpora import KEPT, written
from tests.trainer.huggingface.conftest import Exported
from trainer.annexes.trimming_models import trim
from trainer.huggingface import model_config, tokenizer
from vocab.train import add_sentinels


@pytest.fixture
def corpus(tmp_path):
    return written(tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["mt5", "gpt2"])
def test_a_model_is_cut_by_one_command(kind, tmp_path, corpus, capsys):
    from transformers import AutoTokenizer

    source = Exported("t5_1_1" if kind == "mt5" else "gpt2", tmp_path / "model")
    if kind == "mt5":
        named = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
        source.write({**source.written, **named}, source.tensors)
        lines = " ".join(small_tokenizers.documents(60)).splitlines()
        small_tokenizers._model(tmp_path / "sp", lines, "m", size=370, pad_id=0, eos_id=1, unk_id=2,
                                bos_id=-1)  # fmt: skip
        base = vocabulary.from_bytes(add_sentinels((tmp_path / "sp" / "m.model").read_bytes(), 10))
        (tmp_path / "model" / "spiece.model").write_bytes(base.model)
    else:
        path = small_tokenizers.gpt2(tmp_path / "bpe", small_tokenizers.documents(60), 370)
        base = vocabulary.load(path)
        tokenizer.write(str(source.folder), base, tokenizer.Roles("<|endoftext|>", ends=False))
    flags = [f"--from={tmp_path}/model", f"--corpus={corpus}", f"--to={tmp_path}/small"]
    assert trim.main(flags) == 0
    said = capsys.readouterr().out
    assert "logits of the kept pieces differ from the source's by at most 0.0e+00" in said
    small = model_config(str(tmp_path / "small"))
    left = vocabulary.load(f"{tmp_path}/small")
    assert left.size <= small.vocab_size < left.size + 128
    stored = json.loads((tmp_path / "small" / "config.json").read_text())
    assert stored["model_type"] == kind
    assert stored["eos_token_id"] == left.special.eos
    theirs = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert theirs(KEPT, add_special_tokens=False)["input_ids"] == left.encode([KEPT])[0].tolist()
    assert trim.main(flags) == 0
    assert "is there already" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path, corpus):
    model = Exported("t5_1_1", tmp_path / "model")
    flags = [f"--from={model.folder}", f"--corpus={corpus}", f"--to={tmp_path}/small"]
    with pytest.raises(UserError, match="its vocabulary is unknown because there is no"):
        trim.main(flags)
    small_tokenizers.bert(tmp_path / "bert", small_tokenizers.documents(30), size=390)
    with pytest.raises(UserError, match=r"has 384 rows, but the vocabulary .* 390 ids"):
        trim.main([*flags, f"--vocabulary={tmp_path}/bert"])
    with pytest.raises(UserError, match="--extra_ids has no effect without --vocabulary"):
        trim.main([*flags, "--extra_ids=3"])
    (tmp_path / "empty.jsonl").write_text('{"id": "1", "text": ""}')
    small_tokenizers.bert(tmp_path / "less", small_tokenizers.documents(30), size=300)
    with pytest.raises(UserError, match="has no text: name one"):
        trim.main([flags[0], f"--corpus=json:{tmp_path}/empty.jsonl", flags[2],
                   f"--vocabulary={tmp_path}/less"])  # fmt: skip
