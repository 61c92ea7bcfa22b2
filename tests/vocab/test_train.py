"""Runs vocab.train as a user does."""

import argparse
import ast
import hashlib
import inspect
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import vocabulary
from tasks.document_kind import DocumentKind
from tasks.reading import languages, sources, stdlib_docs
from tasks.terminal.flags import made, parse
from tests.support.corpora import write_json
from tests.support.in_process import run
from tests.support.processes import completed, wait_for
from tests.support.words import changed
from tests.trainer.conftest import assert_one_line
from vocab import fit, train, weighting

ROOT = pathlib.Path(__file__).parents[2]
FILES = ["manifest.json", "report.json", "sentencepiece.model", "sentencepiece.vocab"]


def started(module, *arguments, hash_seed="0"):
    return completed(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 200 documents of English with some characters that are too rare for a piece."""
    path = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    documents = [text for text in stdlib_docs.documents().values() if len(text) < 6000][:200]
    texts = {str(number): text for number, text in enumerate(documents)}
    return f"{write_json(path, texts | {'wrong': 5})}?validation=0.2"


SMALL = ("--vocab_size=600", "--extra_ids=20", "--character_coverage=0.999")


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("vocabulary") / "out"
    done = started("vocab.train", f"--corpus={corpus}", f"--output={output}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert not [each for each in done.stderr.splitlines() if not each.startswith("counting")]
    return output, done.stdout


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.processes
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


@pytest.mark.processes
def test_two_runs_give_the_same_bytes(trained, corpus, tmp_path):
    flags = (f"--corpus={corpus}", f"--output={tmp_path}", *SMALL)
    done = started("vocab.train", *flags, hash_seed="7")
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
    counts = manifest["counts"]
    assert counts["documents_left_out"] == {"not a string": 1}
    assert counts["documents"] > 100
    assert counts["words_kept"] == counts["words"] > 3 * counts["distinct_words"] > 1000


def test_a_second_run_keeps_the_finished_vocabulary(trained, corpus):
    output, first = trained
    before = {name: (output / name).stat() for name in FILES}
    done = run("vocab.train", f"--corpus={corpus}", f"--output={output}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the vocabulary is already finished: {output} (sha256 ")
    assert done.stdout.splitlines()[1:] == first.splitlines()[2:]
    after = {name: (output / name).stat() for name in FILES}
    assert [after[name].st_mtime_ns for name in FILES] == [
        before[name].st_mtime_ns for name in FILES
    ]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("[]")])
def test_a_lost_report_is_one_line(trained, corpus, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    damage(copy / "report.json")
    done = run("vocab.train", f"--corpus={corpus}", f"--output={copy}", *SMALL)
    assert_one_line(done.returncode, done.stderr, "report.json")


def test_a_killed_run_is_resumed(trained, corpus, tmp_path):
    for name in ("report.json", "sentencepiece.model"):
        shutil.copy(trained[0] / name, tmp_path / name)
    (tmp_path / "sentencepiece.model").write_bytes(b"half")
    (tmp_path / ".partial-abc-sentencepiece.model").write_bytes(b"half")
    done = run("vocab.train", f"--corpus={corpus}", f"--output={tmp_path}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert contents(tmp_path) == contents(trained[0])


def test_the_report_measures_the_vocabulary(trained, corpus):
    output, printed = trained
    table = json.loads((output / "report.json").read_text())
    assert table["split"] == "validation"
    assert 20 < table["documents"] < 70
    assert 1 < table["tokens_per_word"] < 6
    assert table["bytes_per_token"] == pytest.approx(table["bytes"] / table["tokens"], abs=1e-6)
    assert table["unknown_rate"] > 0
    assert 0.99 < table["character_coverage"] < 1
    assert table["pieces"] == 597
    assert 0.5 < table["used_share"] <= 1
    scripts = table["by_script"]
    assert list(scripts) == ["Latin", "digits", "punctuation"]
    assert sum(found["words"] for found in scripts.values()) == table["words"]
    assert str(fit.Report.from_dict(table)) in printed
    assert "next: python -m pipeline.build --task=span_corruption --name=mine" in printed


def test_byte_fallback_leaves_nothing_unknown(corpus, tmp_path):
    found = sources.resolve(sources.parse(corpus))
    options = train.Options(700, extra_ids=3, character_coverage=0.99, byte_fallback=True)
    loaded = train.train(options, found, str(tmp_path))
    assert loaded.processor.decode(loaded.processor.encode("naïve 世界")) == "naïve 世界"
    measured = fit.measure(loaded, found)
    assert measured.unknown_rate == 0
    assert measured.byte_rate > 0
    assert measured.pieces == 697


@pytest.mark.slow
def test_workers_pieces_and_kills_give_the_same_bytes(trained, corpus, tmp_path):
    """Counts with two processes; the first run is killed once it has written some counts."""
    command = [sys.executable, "-m", "vocab.train", f"--corpus={corpus}", f"--output={tmp_path}"]
    command += [*SMALL, "--workers=2"]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert wait_for(lambda: any(tmp_path.glob("counts-*")), killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "manifest.json").exists()
    done = completed(command)
    assert done.returncode == 0, done.stderr
    assert "reusing the counts of " in done.stdout
    assert contents(tmp_path) == contents(trained[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.processes
def test_counts_made_with_other_options_are_not_reused(trained, corpus, tmp_path):
    flags = [f"--corpus={corpus}", f"--output={tmp_path}", *SMALL[:1], *SMALL[2:]]
    assert "or less" in refused(*flags, "--extra_ids=20", "--vocab_size=60000")
    counted = sorted(path.name for path in tmp_path.iterdir())
    assert counted
    assert {name[:7] for name in counted} == {"counts-"}
    refused(*flags, "--extra_ids=20", "--vocab_size=60000", "--normalization=nmt_nfkc_cf")
    assert not {path.name for path in tmp_path.iterdir()} & set(counted)
    done = run("vocab.train", *flags, "--extra_ids=20")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == contents(trained[0])


@pytest.mark.processes
def test_an_error_of_a_worker_is_one_line(tmp_path):
    rows = pa.table({"text": ["some text of a document"] * 30_000})
    path = tmp_path / "bad.parquet"
    pq.write_table(rows, path, row_group_size=3000, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 1000] = bytes(1000)
    path.write_bytes(data)
    flags = ["--workers=2", "--vocab_size=100", f"--output={tmp_path / 'out'}"]
    assert "cannot be read" in refused(f"--corpus=parquet:{path}", *flags)
    line = refused(f"--corpus=parquet:{path}", *flags, "--runner=DirectRunner")
    assert "unknown --runner=DirectRunner" in line
    assert "unknown flag --sede" in refused(f"--corpus=parquet:{path}", *flags, "--sede=1")


def test_memory_bytes_limits_the_words_trained_on(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        train.learn, "limits", lambda memory: (memory // 10**6, memory // 2 * 10**6)
    )
    found = sources.resolve(sources.parse(corpus))
    options = train.Options(300, extra_ids=0, character_coverage=0.98, memory_bytes=10**10)
    train.train(options, found, str(tmp_path))
    used = json.loads((tmp_path / "manifest.json").read_text())["counts"]
    assert used["distinct_words_kept"] < used["distinct_words"] / 2
    assert used["words_kept"] > used["words"] / 2
    assert used["threshold"] > 1
    assert "are sampled to fit --memory_bytes" in capsys.readouterr().out


# --- options


def options_of(corpus, folder, **options):
    """Trains a vocabulary of 400 pieces with options given as flags."""
    flags = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]
    usual = [f"--corpus={corpus}", f"--output={folder}", "--vocab_size=400", "--extra_ids=5"]
    words = changed(*usual, *flags)
    chosen, _ = train.options_of(made(train.Flags, parse(train.Flags, words)))
    loaded = train.train(chosen, sources.resolve(sources.parse(corpus)), str(folder))
    written = json.loads((folder / "manifest.json").read_text())["options"]
    assert {name: written[name] for name in options if name in written} == {
        name: value for name, value in options.items() if name in written
    }
    return loaded.processor, [loaded.processor.id_to_piece(i) for i in range(loaded.size)]


def test_split_digits(trained, corpus, tmp_path):
    def numbers(pieces):
        return [p for p in pieces if sum(c.isdigit() for c in p) > 0 and len(p.strip("▁")) > 1]

    loaded = vocabulary.load(str(trained[0]))
    usual = [loaded.processor.id_to_piece(i) for i in range(600)]
    assert numbers(usual)
    processor, pieces = options_of(corpus, tmp_path, split_digits=True)
    assert not numbers(pieces[:400])
    assert [p.strip("▁") for p in processor.encode("2024", out_type=str) if p != "▁"] == [*"2024"]


def test_max_piece_length(trained, corpus, tmp_path):
    loaded = vocabulary.load(str(trained[0]))
    assert max(len(loaded.processor.id_to_piece(i)) for i in range(600)) > 6
    _, pieces = options_of(corpus, tmp_path, max_piece_length=4)
    assert max(map(len, pieces[3:400])) == 4


@pytest.mark.processes
def test_normalization(corpus, tmp_path):
    usual, _ = options_of(corpus, tmp_path / "usual")
    assert usual.encode("Ａ b") == usual.encode("A b")
    lower, pieces = options_of(corpus, tmp_path / "lower", normalization="nmt_nfkc_cf")
    assert lower.encode("THE") == lower.encode("the")
    assert "The" not in "".join(pieces)
    identity, _ = options_of(corpus, tmp_path / "identity", normalization="identity")
    assert identity.unk_id() in identity.encode("Ａ")


def test_model_type_and_character_coverage(corpus, tmp_path):
    bpe, pieces = options_of(corpus, tmp_path / "bpe", model_type="bpe")
    assert [bpe.get_score(i) for i in range(3, 9)] == [0, -1, -2, -3, -4, -5]
    _, few = options_of(corpus, tmp_path / "few", model_type="bpe", character_coverage=0.98)
    assert sum(len(p) == 1 for p in few) < sum(len(p) == 1 for p in pieces)


def test_user_defined_symbols(corpus, tmp_path):
    (tmp_path / "symbols.txt").write_bytes(b"\xef\xbb\xbf<code>\r\n\n<python>\n")
    flags = [
        f"--corpus={corpus}",
        f"--output={tmp_path / 'out'}",
        "--vocab_size=400",
        "--user_defined_symbols=self,{}",
        "--user_defined_symbols=<py>",
        f"--user_defined_symbols_file={tmp_path / 'symbols.txt'}",
    ]
    train.main(flags)
    loaded = vocabulary.load(str(tmp_path / "out"))
    symbols = ["self", "{}", "<py>", "<code>", "<python>"]
    assert [loaded.processor.id_to_piece(i) for i in range(3, 8)] == symbols
    assert loaded.size == 500
    text = "myself<py>call{}<code> <python>"
    found = [token for token in loaded.processor.encode(text) if 3 <= token < 8]
    assert found == [3, 5, 4, 6, 7]
    assert loaded.processor.decode(loaded.processor.encode(text)) == text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["options"]["user_defined_symbols"] == symbols
    assert not any("self" in loaded.processor.id_to_piece(i) for i in range(8, 400))


CODE = """def f(x):
\tif x:   # two\ttabs, three spaces
        return {"a": [1,  2]}\r


class  Ünicode:  pass\x20\x20
    """


@pytest.mark.processes
def test_whitespace_is_kept(tmp_path):
    documents = [inspect.getsource(module) for module in (argparse, ast, json.decoder, textwrap)]
    corpus = f"{write_json(tmp_path / 'code.jsonl', documents)}?validation=0"
    processor, pieces = options_of(
        corpus, tmp_path / "out", keep_whitespace=True, byte_fallback=True, vocab_size=1200
    )
    assert pieces[3:5] == ["\n", "\t"]
    assert {"▁▁▁▁", "▁▁▁▁▁▁▁▁"} <= set(pieces)
    assert not [piece for piece in pieces[5:1200] if "\n" in piece or "\t" in piece]
    for text in (CODE, *documents, " a", "a ", "\n", "世界\x00\u200b", "<extra_id_3>  x"):
        assert processor.decode(processor.encode(text)) == text
    assert len(processor.encode("\n        return")) <= 3
    usual, _ = options_of(corpus, tmp_path / "usual", byte_fallback=True)
    assert usual.decode(usual.encode(CODE)) == " ".join(CODE.split())


# --- user errors


def refused(*arguments):
    done = run("vocab.train", *arguments)
    assert done.returncode == 2, done.stderr
    # A busy machine also prints progress.
    (line,) = [each for each in done.stderr.splitlines() if not each.startswith("counting")]
    assert line.startswith("python -m vocab.train: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vocab_sise=9"], "unknown flag --vocab_sise (did you mean --vocab_size?)"),
        (["--vocab_size=0"], "must be more than 0"),
        (["--vocab_size=many"], "--vocab_size=many: it must be a whole number"),
        (["--memory_bytes=inf"], "--memory_bytes=inf: it must be a whole number"),
        (["--model_type=foo"], "--model_type=foo: it must be one of 'bpe', 'unigram'"),
        (["--memory_bytes=1e6"], "must be at least 1,000,000,000"),
        (["--extra_ids=-1"], "--extra_ids=-1: it must be 0 or more"),
        (["--vocab_size=50000"], "the corpus yields at most "),
        (["--vocab_size=20"], "the characters of the corpus and the special pieces take "),
        (["--vocab_size=500", "--character_coverage=7"], "must be between 0.98 and 1"),
        (["--max_piece_length=0"], "must be from 1 to 512"),
        (["--memory_bytes=1000000"], "must be at least 1,000,000,000"),
        (["--workers=0"], "--workers=0: it must be 1 or more"),
        (["--keep_whitespace", "--normalization=nmt_nfkc"], "tabs and line ends must remain"),
        (["--user_defined_symbols=a b"], "without spaces"),
        (["--user_defined_symbols=a,b,a"], "must be given once, not twice"),
        (["--user_defined_symbols=<extra_id_5>"], "every vocabulary has"),
        (["--user_defined_symbols_file=/nothing/here"], "cannot be read"),
    ],
)
def test_a_bad_flag_is_one_line(corpus, tmp_path, flags, says):
    output = tmp_path / "out"
    line = refused(f"--corpus={corpus}", f"--output={output}", *flags)
    assert says in line
    assert "RuntimeError" not in line
    left = list(output.iterdir()) if output.exists() else []
    assert all(path.name.startswith("counts-") for path in left)


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_smallest_size_that_is_named_works(tmp_path, model_type):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 3)
    flags = [f"--corpus=text:{tmp_path}/a.txt", f"--output={tmp_path}/out"]
    flags += [f"--model_type={model_type}", "--user_defined_symbols=<one>,<two>"]
    line = refused(*flags, "--vocab_size=20")
    least = int(re.search(r"--vocab_size=(\d+) or more$", line)[1])
    assert f"--vocab_size={least} or more" in refused(*flags, f"--vocab_size={least - 1}")
    assert run("vocab.train", *flags, f"--vocab_size={least}").returncode == 0
    if model_type == "unigram":
        line = refused(*flags, "--vocab_size=1000", f"--output={tmp_path}/most")
        most = int(re.search(r"--vocab_size=(\d+) or less$", line)[1])
        flags += [f"--vocab_size={most}", f"--output={tmp_path}/most"]
        assert run("vocab.train", *flags).returncode == 0


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
    assert "did you mean parquet?" in line("paquet:x")
    assert "no file matches" in line(f"parquet:{tmp_path}/nothing-*.parquet")
    assert "bad.parquet cannot be read" in line(f"parquet:{tmp_path}/bad.parquet")
    assert "has no column text" in line(f"parquet:{tmp_path}/body.parquet")
    assert "has no text in train" in line(f"text:{tmp_path}/blank.txt")
    assert "has no text in train" in line(f"text:{tmp_path}/invisible.txt")
    assert "left out: 1 × null" in line(f"parquet:{tmp_path}/nulls.parquet?validation=0")


def test_an_unusable_output_is_one_line(trained, corpus, tmp_path):
    def line(output, *flags):
        return refused(f"--corpus={corpus}", f"--output={output}", *SMALL, *flags)

    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in line(tmp_path / "file")
    assert "no folder can be made here" in line("/proc/vocabulary")
    text = line(trained[0], "--max_piece_length=5")
    assert "settings: max_piece_length (was 16, now 5): choose another --output" in text
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "sentencepiece.model").write_bytes(b"somebody's")
    assert "that vocab.train did not write" in line(foreign)
    assert (foreign / "sentencepiece.model").read_bytes() == b"somebody's"
    changed = tmp_path / "changed"
    shutil.copytree(trained[0], changed)
    with (changed / "sentencepiece.model").open("ab") as file:
        file.write(b"more")
    assert "does not match the manifest.json beside it" in line(changed)


def test_a_sentinel_in_the_text_of_the_corpus_is_rejected():
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.pieces.add(piece="<extra_id_1>", score=-1.0)
    with pytest.raises(train.UserError, match="corpus contains <extra_id_1>"):
        train.add_sentinels(proto.SerializeToString(), 2)


def test_the_next_command_names_corpora_without_names():
    texts = ["json:a.jsonl", "json:b.jsonl"]
    parts = weighting.Corpora(dict.fromkeys(texts))
    flags = [each.removeprefix("--corpus=") for each in weighting._corpus_flags(texts, parts)]
    assert [str(each) for each in languages.specs(flags, None).values()] == texts
    named = ["a=json:a.jsonl", "b=json:b.jsonl"]
    found = weighting._corpus_flags(named, weighting.Corpora(dict.fromkeys("ab")))
    assert found == [f"--corpus={each}" for each in named]


def test_the_next_command_builds_the_same_corpora():
    text, pairs = (
        SimpleNamespace(spec=SimpleNamespace(unit=unit))
        for unit in (DocumentKind.TEXT, DocumentKind.PAIR)
    )
    flags = SimpleNamespace(corpus=("fasta:a.fa",), languages=None, task_module="mine.py")
    printed = weighting.next_build(flags, weighting.Corpora({"": text}), "out")
    assert "--task=span_corruption --name=mine --corpus=fasta:a.fa --task_module=mine.py" in printed
    assert "for another objective" in printed
    printed = weighting.next_build(flags, weighting.Corpora({"": pairs}), "out")
    assert "--task=supervised --name=mine" in printed
    assert "another objective" not in printed
