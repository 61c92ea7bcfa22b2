"""Mistakes of people who are new here: each ends with exit code 2 and one line that names it."""

import json
import resource

import pytest

from pipeline.building.options import Options
from pipeline.runners import engines
from tasks.terminal import command_line
from tasks.terminal.flags import flags_of
from tests.trainer.conftest import assert_one_line, ended
from trainer.config.from_flags import RunFlags

TASK = "python_docs_span_corruption"


@pytest.fixture(scope="module")
def folder(text_cache, tmp_path_factory):
    """A folder with files to stumble over."""
    path = tmp_path_factory.mktemp("mistakes")
    (path / "a.txt").write_text("some text\n")
    (path / "empty.txt").write_text("")
    (path / "bad.txt").write_bytes(b"caf\xe9\n")
    (path / "nested.jsonl").write_text(json.dumps({"doc": {"text": "a"}}) + "\n")
    (path / "not.parquet").write_text("no")
    (path / "tokenizer.json").write_text("{}")
    (path / "odd.model").write_text("no model")
    (path / "theirs").mkdir()
    (path / "theirs" / "config.json").write_text(json.dumps({"model_type": "bart"}))
    (path / "theirs" / "model.safetensors").write_text("")
    (path / "file").write_text("")
    return path


TRAIN = ["--preset=t5_1_1_tiny", f"--task={TASK}", "--cache_dir={caches}", "--model_dir={new}"]
VOCABULARY = "--vocabulary={vocabulary}"
BUILD = ["--task=ul2", "--name=mine", VOCABULARY, "--cache_dir={new}"]
TEXT = "--corpus=text:{folder}/a.txt"

MISTAKES = [
    # The name and the corpus of a build.
    ("pipeline.build", ["--task=ul2", VOCABULARY, "--cache_dir={new}"], "add --name=NAME"),
    ("pipeline.build", ["--task=mine_ul2", VOCABULARY, "--cache_dir={new}"], "give --corpus"),
    ("pipeline.build", ["--task=mine", "--name=a", VOCABULARY, "--cache_dir={new}"], "span_corr"),
    ("pipeline.build", ["--task=mine", TEXT, VOCABULARY, "--cache_dir={new}"], "NAME_OBJECTIVE"),
    ("pipeline.build", ["--task=rlm_ul3", VOCABULARY, "--cache_dir={new}"], "did you mean rlm_ul2"),
    ("pipeline.build",
     ["--task=prefix_lm", "--name=my_decoder", TEXT, VOCABULARY, "--cache_dir={new}"],
     "--name=my_decoder cannot begin the name"),
    ("pipeline.build", ["--task=ul2", "--name=a/b", TEXT, VOCABULARY, "--cache_dir={new}"],
     "--name=a/b cannot begin the name"),
    ("pipeline.build", ["--task=ul2", "--name=", TEXT, VOCABULARY, "--cache_dir={new}"], "--name="),
    ("pipeline.build", [*BUILD, "--corpus=data/*.jsonl.gz"], "did you mean json:data/*.jsonl.gz?"),
    ("pipeline.build", [*BUILD, "--corpus=books/*.txt"], "did you mean text:books/*.txt?"),
    ("pipeline.build", [*BUILD, "--corpus=https://huggingface.co/datasets/a/b/tree/main"],
     "did you mean hf:a/b?"),
    ("pipeline.build", [*BUILD, "--corpus=hf:https://huggingface.co/datasets/a/b"],
     "did you mean hf:a/b?"),
    ("pipeline.build", [*BUILD, "--corpus=jsonl:a"], "did you mean json?"),
    ("pipeline.build", [*BUILD, "--corpus=text:a?document=page"], "file or block, not page"),
    ("pipeline.build", [*BUILD, "--corpus=text:{folder}/*.md"], "no file matches"),
    ("pipeline.build", [*BUILD, "--corpus=text:{folder}"], "is a folder: name its files"),
    ("pipeline.build", [*BUILD, "--corpus=text:{folder}/empty.txt"], "is empty"),
    ("pipeline.build", [*BUILD, "--corpus=parquet:{folder}/not.parquet"], "not.parquet"),
    ("pipeline.build", [*BUILD, "--corpus=json:{folder}/nested.jsonl?column=doc"],
     "column doc is object, not text: name a column in it, such as doc.text"),
    ("pipeline.build", [*BUILD, "--corpus=json:{folder}/nested.jsonl"], "add ?column=NAME"),
    # The vocabulary and the folders of a build.
    ("pipeline.build",
     ["--task=lm", "--name=a", TEXT, "--vocabulary={folder}/none", "--cache_dir={new}"],
     "make one with vocab.train"),
    ("pipeline.build",
     ["--task=lm", "--name=a", TEXT, "--vocabulary={folder}/odd.model", "--cache_dir={new}"],
     "is not a SentencePiece model"),
    ("pipeline.build", [*BUILD, TEXT, "--vocabulary={folder}/tokenizer.json"], "or is damaged"),
    ("pipeline.build", [*BUILD, TEXT, "--extra_ids=100"], "leave out --extra_ids=100"),
    ("pipeline.build", [*BUILD, TEXT, "--workers=0"], "--workers=0: it must be 1 or more"),
    ("pipeline.build", [*BUILD, TEXT, "--row_token=5"], "did you mean --row_tokens?"),
    ("pipeline.build", ["--task=lm", "--name=a", TEXT, VOCABULARY, "--cache_dir={folder}/file"],
     "file"),
    # Misspelt flags, and those of other commands.
    ("pipeline.build", [], "required: --task, --vocab"),
    ("pipeline.build", [*BUILD, TEXT, "--preset=x"], "--preset (it is a flag of trainer.pretrain)"),
    ("vocab.train", ["--corpu=text:a"], "unknown flag --corpu (did you mean --corpus?)"),
    ("vocab.train", [TEXT, "--output=a", "--model_dir=b"], "(it is a flag of trainer.pretrain)"),
    ("pipeline.verify", ["--cach=a"], "unknown flag --cach (did you mean --cache?)"),
    ("trainer.export", ["--model=a", "--output=b"], "unknown flag --model (did you mean --model_"),
    # Vocabularies.
    ("vocab.train", ["--corpus=text:{folder}/bad.txt", "--output={new}"], "invalid UTF-8"),
    ("vocab.train", [TEXT, "--vocab_size=0", "--output={new}"], "it must be more than 0"),
    ("vocab.train", [TEXT, "--vocab_size=many", "--output={new}"], "it must be a whole number"),
    # Runs.
    ("trainer.pretrain", [], " is missing"),
    ("trainer.pretrain", ["--preset=t5-small"], "did you mean t5_1_0_small?"),
    ("trainer.pretrain", ["--preset=google/t5-v1_1-base"], "did you mean t5_1_1_base?"),
    ("trainer.pretrain", ["--preset=t5_1_1_tiny"], "--task is missing"),
    ("trainer.pretrain", TRAIN[:2], "--model_dir is missing"),
    ("trainer.pretrain", [*TRAIN, "--model_dir={new}/run[1]"],
     "run[1]: checkpoints need a path without [, ], *, ? and \\:"),
    ("trainer.pretrain", [*TRAIN, "--model_dir={new}\\run"], "checkpoints need a path without ["),
    ("trainer.pretrain", [*TRAIN, "--dropout_rate=0"], "did you mean --model.dropout_rate?"),
    ("trainer.pretrain", [*TRAIN, "--optimizer.learning_rate=-1"], "--optimizer.learning_rate=-1"),
    ("trainer.pretrain", [*TRAIN, "--model.dtype=fp16"], "'bfloat16', 'float32'"),
    ("trainer.pretrain", [*TRAIN, f"--seed={2**63}"], "a 64-bit integer"),
    ("trainer.pretrain", [*TRAIN, "--task=python_docs"], f"has caches of {TASK}"),
    ("trainer.pretrain", [*TRAIN, "--task=mine_ul2"], "no cache for task mine_ul2"),
    ("trainer.pretrain", [*TRAIN, "--task=mine_ul2=a"], "the rate of mine_ul2 is a"),
    ("trainer.pretrain", [*TRAIN, "--cache_dir={folder}/gone"], "--cache_dir"),
    ("trainer.pretrain", ["--init_from=hf:google/t5-v1_1-small"], "hf download google/t5-v1_1"),
    ("trainer.pretrain", ["--init_from=hf:{folder}/theirs"], "model_type is bart"),
    # Folders that cannot be made.
    ("trainer.pretrain", [*TRAIN, "--train_steps=5", "--model_dir=/proc/z"], "/proc/z: no folder"),
    ("trainer.pretrain", [*TRAIN, "--train_steps=5", "--model_dir={new}{long}"], "is too long"),
    ("pipeline.build", [*BUILD, TEXT, "--cache_dir=/proc/z"], "/proc/z/mine_ul2: no folder can"),
    ("pipeline.build", [*BUILD, TEXT, "--cache_dir={new}{long}"], "choose a shorter one"),
    ("vocab.train", [TEXT, "--output=/proc/z"], "/proc/z: no folder can be made here"),
]  # fmt: skip
EXPORTS = [
    ("trainer.export", ["--model_dir={folder}", "--output=/proc/z/y"], "/proc/z: no folder can"),
    ("trainer.export", ["--model_dir={folder}", "--output={new}"], "holds no run"),
]
MISTAKE = ("module", "arguments", "words")


def named(mistakes, *marks):
    return [pytest.param(*each, id=f"{each[0]}-{each[2]}"[:50], marks=marks) for each in mistakes]


@pytest.mark.parametrize(MISTAKE, named(MISTAKES) + named(EXPORTS, pytest.mark.torch))
def test_a_mistake_is_one_line(module, arguments, words, folder, text_cache, tmp_path, capsys):
    places = {
        "folder": folder, "caches": text_cache.parent,
        "vocabulary": text_cache / "sentencepiece.model", "new": tmp_path / "new",
        "cache": text_cache, "long": "n" * 300,
    }  # fmt: skip
    code, errors = ended(module, [each.format(**places) for each in arguments], capsys)
    assert_one_line(code, errors, words)


def test_a_limit_on_the_size_of_files_is_one_line(folder, text_cache, tmp_path, capsys):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
    arguments = ["--task=ul2", "--name=mine", f"--corpus=text:{folder}/a.txt"]
    arguments += [f"--vocabulary={text_cache}/sentencepiece.model", f"--cache_dir={tmp_path}"]
    try:
        code, errors = ended("pipeline.build", arguments, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    name = f"{tmp_path}/mine_ul2/sentencepiece.model"
    assert_one_line(code, errors, f"{name}: a file would exceed")


def test_a_folder_of_transformers_without_its_prefix_is_named(folder):
    from trainer.checkpoints import stored

    with pytest.raises(command_line.UserError, match=r"name it as --init_from=hf:.*/theirs"):
        stored.find(str(folder / "theirs"))


def test_flags_said_to_be_of_pretrain_are():
    known, builds = ({each.name for each in flags_of(kind)} for kind in (RunFlags, Options))
    assert set(engines.OF_PRETRAIN) <= known - builds
