"""Every kind of vocabulary from a build to transformers, and padding where id 0 is a piece."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pipeline import verify
from tasks import vocabulary
from tasks.adapters import CacheSource
from tasks.cache.manifest import CacheManifest, as_json, plan_from_dict
from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS, SpecialIds
from tests.support import small_tokenizers
from tests.support.trees import assert_close
from tests.trainer.conftest import built as of_build
from tests.trainer.model.conftest import TinyModel
from trainer import export, generate, pretrain
from trainer.config import LossConfig, presets
from trainer.data.features import converter, filling
from trainer.data.task_record import plain
from trainer.engine.loss import model_loss
from trainer.model.transformer import run_model

pytestmark = pytest.mark.processes  # whole runs

ODD = [
    "!", "ünï çödé — 日本 🇷🇴", "!! three  spaces\tand a tab !", "it spells <|endoftext|> and [SEP]",
]  # fmt: skip


@pytest.fixture(scope="module")
def documents():
    return small_tokenizers.documents(100) + ODD


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines))
    return f"json:{path}"


def built(folder, kind, objective, documents, corpus, *flags):
    """Builds a cache; returns (folder of the cache, --vocabulary, the vocabulary)."""
    path = small_tokenizers.KINDS[kind](folder / "tokenizer", " ".join(documents).splitlines())
    of_build(
        *(f"--name={kind}", f"--task={objective}", f"--corpus={corpus}"),
        *(f"--vocabulary={path}", "--extra_ids=40", f"--cache_dir={folder}/cache"),
        *("--row_tokens=50", "--max_quarantined=0.1", *flags),
    )
    return f"{folder}/cache/{kind}_{objective}", path, vocabulary.load(path, 40)


RUNS = {
    "gpt2": ("t5_1_1_tiny", "span_corruption"), "llama": ("llama_tiny", "full_lm"),
    "bert": ("bert_tiny", "masked_lm"), "gemma": ("t5_1_1_tiny", "span_corruption"),
    "llama3": ("llama_tiny", "full_lm"), "unigram": ("t5_1_1_tiny", "span_corruption"),
    "byte": ("llama_tiny", "full_lm"),
}  # fmt: skip
ENCODER, DECODER = "--model.num_encoder_layers=1", "--model.num_decoder_layers=1"
FLAGS = {
    "span_corruption": ["--lengths.inputs=64", "--lengths.targets=18", ENCODER, DECODER],
    "full_lm": ["--lengths.targets=40", DECODER],
    "masked_lm": ["--lengths.inputs=40", "--lengths.targets=40", ENCODER],
}


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_rows_hold_the_ids_of_the_library_and_train(kind, documents, corpus, tmp_path):
    preset, objective = RUNS[kind]
    cache, _, loaded = built(tmp_path, kind, objective, documents, corpus)
    assert_rows(cache, loaded, documents, kind)
    assert pretrain.main([f"--preset={preset}", *run_flags(kind, cache, tmp_path)]) == 0


def assert_rows(cache, loaded, documents, kind):
    """Asserts that rows are the library's ids, without what spells a special token.

    Returns the ids of all documents, those of the documents that are kept, and those of the rows.
    """
    ids = loaded.encode(documents)
    kept = [each.tolist() for each in ids if len(each) and not loaded.reserved[each].any()]
    assert len(ids) - len(kept) == (kind in ("gpt2", "bert"))
    eos = [loaded.special.eos] * cache.endswith("full_lm")
    wanted = [token for each in kept for token in (*each, *eos)]
    source = CacheSource(cache, keep_tails=True)
    rows = [source[number]["tokens"] for number in range(len(source))]
    assert np.concatenate(rows).tolist() == wanted
    assert (0 in wanted) == (kind in ("gpt2", "llama3"))
    return ids, kept, wanted


def run_flags(kind, cache, folder):
    objective = RUNS[kind][1]
    run = [f"--task={kind}_{objective}", f"--cache_dir={cache}", f"--model_dir={folder}/model"]
    if kind == "bert":
        run += ["--objective=mask=[MASK],classify=[CLS]"]
    more = ["--batch_size=4", "--train_steps=3", "--evaluation.every_steps=0"]
    return [*run, *FLAGS[objective], *more]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_from_a_build_to_transformers(kind, documents, corpus, tmp_path, capsys):
    from transformers import AutoTokenizer

    preset, objective = RUNS[kind]
    cache, _, loaded = built(tmp_path, kind, objective, documents, corpus)
    assert verify.main([f"--cache={cache}"]) == 0
    ids, _, _ = assert_rows(cache, loaded, documents, kind)

    assert pretrain.main([f"--preset={preset}", *run_flags(kind, cache, tmp_path)]) == 0
    assert export.main([f"--model_dir={tmp_path}/model", f"--output={tmp_path}/exported"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    found = tokenizer(documents, add_special_tokens=False)["input_ids"]
    assert found == [each.tolist() for each in ids]
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == loaded.special.eos
    around = tokenizer("The list")["input_ids"]
    (plain_ids,) = loaded.encode(["The list"])
    if preset == "llama_tiny":
        assert around == [loaded.special.start, *plain_ids]
        assert config["bos_token_id"] == loaded.special.start
    elif preset == "t5_1_1_tiny":
        assert around == [*plain_ids, loaded.special.eos]
        assert config["decoder_start_token_id"] == loaded.special.start
        assert tokenizer("<extra_id_0>", add_special_tokens=False)["input_ids"] == [loaded.size - 1]
    else:
        assert around == [loaded.special.bos, *plain_ids, loaded.special.eos]
        return
    capsys.readouterr()
    generate.main([f"--model_dir={tmp_path}/model", "--prompt=The list", "--max_new_tokens=3"])
    assert capsys.readouterr().out


def test_a_cache_needs_its_own_vocabulary(documents, corpus, tmp_path):
    cache, _, _ = built(tmp_path, "byte", "full_lm", documents, corpus)
    with pytest.raises(UserError, match=r"vocabulary\.extra_ids: 50, there: 40"):
        built(tmp_path, "byte", "full_lm", documents, corpus, "--extra_ids=50")
    model = tmp_path / "cache" / "byte_full_lm" / "tokenizer.json"
    model.write_bytes(model.read_bytes() + b" ")
    with pytest.raises(UserError, match="is damaged: its sha256 is"):
        _ = CacheSource(cache, task="byte_full_lm")[0]


def test_the_manifest_records_what_the_file_does_not_say(documents, corpus, tmp_path):
    cache, _, loaded = built(tmp_path, "bert", "full_lm", documents, corpus)
    plan = CacheManifest.load(cache).plan
    assert plan.vocabulary == loaded.record
    written = as_json(plan)["vocabulary"]
    assert written["special"] == {"pad": 0, "eos": 3, "unk": 1, "bos": 2}
    assert written["file"] == "tokenizer.json"
    # Plans of SentencePiece with T5's ids, old and new, have neither.
    old = {key: value for key, value in written.items() if key not in ("special", "file")}
    read = plan_from_dict({**as_json(plan), "vocabulary": old})
    assert as_json(read)["vocabulary"] == old
    found = (read.vocabulary.special_ids, read.vocabulary.file_name)
    assert found == (T5_IDS, "sentencepiece.model")
    for change, words in (
        ({"file": "../model"}, r"vocabulary\.file is"),
        ({"special": {"eos": -1}}, r"vocabulary\.special\.eos is"),
        ({"special": {"pad": 0}}, r"vocabulary\.special has no eos"),
        ({"special": {"eos": 1, "sep": 2}}, r'vocabulary\.special has "sep"'),
        ({"size": 3}, r'vocabulary has "size"'),
    ):
        with pytest.raises(UserError, match=words):
            plan_from_dict({**as_json(plan), "vocabulary": {**written, **change}})


PIECE = 5  # the piece that has id 0 in the other numbering


def examples_of(generator, lengths):
    """Returns examples of several lengths in which PIECE is frequent."""
    made = {}
    for name in ("inputs", "targets") if lengths.inputs else ("targets",):
        width = getattr(lengths, name)
        sizes_W = generator.integers(2, width // 2, 6)
        tokens_WN = np.where(
            generator.random((6, width)) < 0.4, PIECE, generator.integers(6, 40, (6, width))
        )
        made[name] = np.where(np.arange(width) < sizes_W[:, None], tokens_WN, 0), sizes_W
    return made


def swapped(values):
    """Exchanges ids 0 and PIECE."""
    return np.where(values == PIECE, 0, np.where(values == 0, PIECE, values))


@pytest.mark.parametrize(
    ("preset", "inputs", "packed"),
    [
        *(("t5_1_1_tiny", 16, packed) for packed in (False, True)),
        *(("llama_tiny", 16, packed) for packed in (False, True)),
        ("llama_tiny", 0, False),  # rows of several examples have inputs
    ],
)
def test_padding_is_not_id_0_where_that_is_a_piece(preset, inputs, packed):
    """The same model and text, with ids 0 and PIECE exchanged, have the same loss and gradients."""
    config = presets.model_preset(preset)
    one_layer = {"num_encoder_layers": min(config.num_encoder_layers, 1), "num_decoder_layers": 1}
    config = dataclasses.replace(config, vocab_size=61, **one_layer)
    lengths = Lengths(inputs, 24)
    examples = examples_of(np.random.default_rng(0), lengths)
    others = {
        name: (np.where(np.arange(v.shape[1]) < n[:, None], swapped(v), 0), n)
        for name, (v, n) in examples.items()
    }
    rows_E = np.array([0, 0, 1, 1, 2, 2])
    # The decoder begins with the id of padding, which is PIECE in the other numbering.
    batches = [
        made.packed(each, rows_E, 3) if packed else made(each)
        for made, each in (
            (converter(config, lengths), examples),
            (converter(config, lengths, SpecialIds(None, 1, 2, bos=PIECE)), others),
        )
    ]
    assert any(0 in each[0][0][: each[1][0]] for each in others.values())
    assert filling(batches[0]) == filling(batches[1])
    tiny = TinyModel(config)
    model, params, size = tiny.model, tiny.params, config.vocab_size

    def exchange(leaf):
        order = np.arange(size)
        order[[0, PIECE]] = PIECE, 0
        axis = [place for place, width in enumerate(leaf.shape) if width == size]
        return np.take(np.asarray(leaf), order, axis[0]) if axis else leaf

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        output = run_model(model, params, batch)
        return model_loss(model).of_batch(output, batch, LossConfig())[0]

    first, gradients = loss(params, batches[0])
    second, others = loss(jax.tree.map(exchange, params), batches[1])
    assert float(first) == pytest.approx(float(second), rel=1e-6)
    assert_close(gradients, jax.tree.map(exchange, others), rtol=1e-4, atol=1e-6)


def test_special_ids_are_plain_and_hashable():
    assert hash(T5_IDS) == hash(SpecialIds())
    assert plain(T5_IDS) == {"class": "SpecialIds", "pad": 0, "eos": 1, "unk": 2, "bos": None}
