"""vocab.train and vocab.report, as a user runs them."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import sources, stdlib_docs, vocabulary
from vocab import report, train

ROOT = pathlib.Path(__file__).parents[2]
FILES = ["manifest.json", "report.json", "sentencepiece.model", "sentencepiece.vocab"]


def run(module, *arguments, hash_seed="0"):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 200 documents of English with some characters that are too rare for a piece."""
    path = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    documents = [text for text in stdlib_docs.documents().values() if len(text) < 6000][:200]
    with path.open("w") as file:
        for number, text in enumerate(documents):
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")
        file.write(json.dumps({"id": "wrong", "text": 5}) + "\n")
    return f"json:{path}?validation=0.2"


SMALL = ("--vocab_size=600", "--extra_ids=20", "--character_coverage=0.999")


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("vocabulary") / "out"
    done = run("vocab.train", f"--corpus={corpus}", f"--output={output}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return output, done.stdout


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_ids_are_t5s_and_sentinels_come_last(trained):
    from sentencepiece import sentencepiece_model_pb2

    loaded = vocabulary.load(str(trained[0]))
    processor = loaded.processor
    assert loaded.size == 620
    assert loaded.record.sentinels == 20
    assert [processor.id_to_piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert processor.bos_id() == -1
    assert [processor.id_to_piece(i) for i in (600, 618, 619)] == [
        "<extra_id_19>",
        "<extra_id_1>",
        "<extra_id_0>",
    ]
    ids = processor.encode("The <extra_id_0> of\n a  <extra_id_1>.")
    assert [token for token in ids if token >= 600] == [619, 618]
    assert processor.decode(ids) == "The <extra_id_0> of a <extra_id_1>."
    proto = sentencepiece_model_pb2.ModelProto.FromString(loaded.model)
    assert {piece.type for piece in proto.pieces[600:]} == {proto.SentencePiece.USER_DEFINED}
    assert proto.trainer_spec.vocab_size == 620


def test_two_runs_give_the_same_bytes(trained, corpus, tmp_path):
    done = run("vocab.train", f"--corpus={corpus}", f"--output={tmp_path}", *SMALL, hash_seed="7")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert contents(tmp_path) == contents(trained[0])


def test_the_manifest_describes_the_files(trained, corpus):
    output, _ = trained
    manifest = json.loads((output / "manifest.json").read_text())
    model = (output / "sentencepiece.model").read_bytes()
    assert manifest["model"]["sha256"] == hashlib.sha256(model).hexdigest()
    assert manifest["options"]["vocab_size"] == 600
    assert manifest["corpus"] == sources.resolve(sources.parse(corpus)).record
    assert manifest["sample"]["documents_left_out"] == {"not a string": 1}
    assert manifest["sample"]["passages"] == manifest["sample"]["passages_in_train"] > 100


def test_a_second_run_keeps_what_is_there(trained, corpus):
    output, first = trained
    before = {name: (output / name).stat() for name in FILES}
    done = run("vocab.train", f"--corpus={corpus}", f"--output={output}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"vocabulary is finished: {output} (sha256 ")
    assert done.stdout.splitlines()[1:] == first.splitlines()[2:]
    after = {name: (output / name).stat() for name in FILES}
    assert [after[name].st_mtime_ns for name in FILES] == [
        before[name].st_mtime_ns for name in FILES
    ]


def test_a_run_that_was_killed_is_made_good(trained, corpus, tmp_path):
    for name in ("report.json", "sentencepiece.model"):
        shutil.copy(trained[0] / name, tmp_path / name)
    (tmp_path / "sentencepiece.model").write_bytes(b"half")
    (tmp_path / ".partial-abc-sentencepiece.model").write_bytes(b"half")
    done = run("vocab.train", f"--corpus={corpus}", f"--output={tmp_path}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert contents(tmp_path) == contents(trained[0])


def test_the_report_says_how_the_vocabulary_fits(trained, corpus):
    output, printed = trained
    table = json.loads((output / "report.json").read_text())
    assert table["split"] == "validation"
    assert 20 < table["documents"] < 70
    assert 1 < table["tokens_per_word"] < 6
    assert table["bytes_per_token"] == pytest.approx(table["bytes"] / table["tokens"], abs=1e-6)
    assert table["unknown_rate"] > 0
    assert table["pieces"] == 597
    assert 0.5 < table["used_share"] <= 1
    done = run("vocab.report", f"--vocabulary={output}", f"--corpus={corpus}")
    assert done.returncode == 0, done.stderr
    shown = str(report.Report.from_dict(table))
    assert shown in printed
    assert shown in done.stdout
    assert "next: python -m pipeline.build --task=rlm_span_corruption" in printed


def test_byte_fallback_leaves_nothing_unknown(corpus, tmp_path):
    found = sources.resolve(sources.parse(corpus))
    options = train.Options(700, extra_ids=3, character_coverage=0.99, byte_fallback=True)
    loaded = train.train(options, found, str(tmp_path))
    assert loaded.processor.decode(loaded.processor.encode("naïve 世界")) == "naïve 世界"
    measured = report.measure(loaded, found)
    assert measured.unknown_rate == 0
    assert measured.byte_rate > 0
    assert measured.pieces == 697


def test_a_sample_smaller_than_the_corpus_is_used(corpus, tmp_path):
    found = sources.resolve(sources.parse(corpus))
    options = train.Options(200, extra_ids=0, character_coverage=0.98, sample_bytes=30_000)
    train.train(options, found, str(tmp_path))
    used = json.loads((tmp_path / "manifest.json").read_text())["sample"]
    assert 20_000 < used["bytes"] <= 30_000 < used["bytes_in_train"]


# --- what a user may get wrong


def refused(*arguments, module="vocab.train"):
    done = run(module, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"python -m {module}: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vocab_sise=9"], "unknown flag --vocab_sise (did you mean --vocab_size?)"),
        (["--vocab_size=0"], "must be more than 0"),
        (["--extra_ids=-1"], "must not be negative"),
        (["--vocab_size=50000"], "Vocabulary size too high (50000). Please set it to a value"),
        (["--vocab_size=20"], "Vocabulary size is smaller than required_chars"),
        (["--vocab_size=500", "--character_coverage=7"], "character_coverage"),
    ],
)
def test_a_bad_flag_is_one_line(corpus, tmp_path, flags, says):
    output = tmp_path / "out"
    line = refused(f"--corpus={corpus}", f"--output={output}", *flags)
    assert says in line
    assert "RuntimeError" not in line
    assert not output.exists() or not list(output.iterdir())


def test_a_bad_corpus_is_one_line(tmp_path):
    def line(corpus):
        return refused(f"--corpus={corpus}", f"--output={tmp_path / 'out'}", "--vocab_size=100")

    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "blank.txt").write_text(" \n\n  \n")
    (tmp_path / "invisible.txt").write_text("\u200b\n" * 100)
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "body.parquet")
    pq.write_table(
        pa.table({"text": pa.array([None, "  "], pa.string())}), tmp_path / "nulls.parquet"
    )
    assert "a corpus is python_docs" in line("paquet:x")
    assert "no file matches" in line(f"parquet:{tmp_path}/nothing-*.parquet")
    assert "bad.parquet cannot be read" in line(f"parquet:{tmp_path}/bad.parquet")
    assert "has no column text" in line(f"parquet:{tmp_path}/body.parquet")
    assert "has no text in train" in line(f"text:{tmp_path}/blank.txt")
    assert "SentencePiece cannot make this vocabulary: it died" in line(
        f"text:{tmp_path}/invisible.txt"
    )
    assert "left out: 1 × null" in line(f"parquet:{tmp_path}/nulls.parquet?validation=0")


def test_an_output_that_cannot_take_it_is_one_line(trained, corpus, tmp_path):
    def line(output, *flags):
        return refused(f"--corpus={corpus}", f"--output={output}", *SMALL, *flags)

    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in line(tmp_path / "file")
    assert "cannot be written" in line("/proc/vocabulary")
    text = line(trained[0], "--seed=5")
    assert "another seed (0 there, 5 now): choose another --output" in text
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "sentencepiece.model").write_bytes(b"somebody's")
    assert "that vocab.train did not write" in line(foreign)
    assert (foreign / "sentencepiece.model").read_bytes() == b"somebody's"
    changed = tmp_path / "changed"
    shutil.copytree(trained[0], changed)
    with (changed / "sentencepiece.model").open("ab") as file:
        file.write(b"more")
    assert "is not the file that manifest.json" in line(changed)


def test_the_text_of_a_sentinel_in_the_corpus_is_named():
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.pieces.add(piece="<extra_id_1>", score=-1.0)
    with pytest.raises(train.UserError, match="corpus contains <extra_id_1>"):
        train.add_sentinels(proto.SerializeToString(), 2)


def test_the_report_refuses_a_vocabulary_that_is_none(corpus, tmp_path):
    line = refused(f"--vocabulary={tmp_path}", f"--corpus={corpus}", module="vocab.report")
    assert "no vocabulary at" in line
