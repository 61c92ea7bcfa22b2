"""Caches of pairs: what they hold, what is left out, and that stock seqio reads them."""

import json
import random
import shutil

import numpy as np
import pytest

from pipeline.build import main as build
from pipeline.verification.cache import verify
from tasks.cache.lineage import Lineage
from tasks.cache.manifest import CacheManifest, sealed
from tasks.cache.pair_windows import open_windows, row_windows
from tasks.objectives import Lengths, Supervised, span_corruption
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAIR_BORDER, load
from tests.support.corpora import write_json
from tests.support.damage import flip
from tests.support.words import changed

TASK = "qa_supervised"


@pytest.fixture(scope="module")
def rows(documents):
    words = " ".join(list(documents.values())[:40]).split()
    generator = random.Random(0)
    found = {}
    for number in range(300):
        begin, size = generator.randrange(len(words) - 200), 1 + int(generator.expovariate(1 / 20))
        after = begin + size
        answer = words[after : after + 1 + int(generator.expovariate(1 / 5))]
        found[f"pair {number}"] = {"q": " ".join(words[begin:after]), "a": " ".join(answer)}
    return found


BAD = [
    {"id": "no answer", "q": "x", "a": "  "},
    {"id": "no question", "q": "", "a": "y"},
    {"id": "null", "q": "x", "a": None},
]


@pytest.fixture
def make(tmp_path, rows, vocabulary):
    """Returns a function that builds a cache of the pairs; further flags replace its own."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_json(folder / "a.jsonl", [*({"id": name, **row} for name, row in rows.items()), *BAD])

    def run(*flags, cache_dir=tmp_path / "cache"):
        own = ["--task=supervised", "--name=qa", f"--vocabulary={vocabulary}", "--extra_ids=100"]
        own += ["--shard_bytes=5000", f"--cache_dir={cache_dir}"]
        if not any(flag.startswith("--corpus=") for flag in flags):
            own.append(f"--corpus=json:{folder}/*.jsonl?inputs={{q}}&targets=a&validation=0.1")
        build(changed(*own, *flags))
        return cache_dir / TASK

    return run


def pairs_of(cache, split="train"):
    """Returns the pairs of a split by id, as lists of ids, inputs and targets."""
    manifest = CacheManifest.load(str(cache))
    windows = row_windows(str(cache), manifest, split)
    lineage = Lineage(str(cache), manifest, split)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    found = {}
    for index, (tokens_N, length) in enumerate(zip(tokens_WN, lengths_W, strict=True)):
        tokens = tokens_N[:length].tolist()
        border = tokens.index(PAIR_BORDER)
        (part,) = lineage.parts(windows.where(index))
        found[part.id] = tokens[:border], tokens[border + 1 :]
        assert part.tokens == part.whole == length - 1
    return found


def test_a_listed_part_of_a_split_pair(tmp_path, vocabulary):
    """Lineage names the parts of pairs that are split, and so do lists."""
    lines = [{"id": "a", "q": "x " * 300, "a": "y"}, {"id": "b", "q": "k", "a": "v"},
             {"id": "c#part2", "q": "k", "a": "v"}, {"id": "c", "q": "k", "a": "v"}]  # fmt: skip
    corpus = write_json(tmp_path / "c.jsonl", lines)
    given = [
        *("--task=supervised", "--name=qa", f"--vocabulary={vocabulary}", "--extra_ids=100"),
        f"--corpus={corpus}?inputs=q&targets=a&validation=0",
        *("--max_inputs=100", "--too_long=split", f"--cache_dir={tmp_path}"),
    ]
    build(given)
    before = pairs_of(tmp_path / TASK)
    assert {"a", "a#part2", "a#part3", "b", "c", "c#part2"} <= set(before)
    (tmp_path / "ids.txt").write_text("a#part2\nc\n")
    build([*given, f"--exclude={tmp_path}/ids.txt"])
    # A copy, as this process keeps what it has read of the other.
    after = pairs_of(shutil.copytree(tmp_path / TASK, tmp_path / "after"))
    assert after == {name: before[name] for name in before if name not in ("a#part2", "c")}
    (left_out,) = (tmp_path / TASK).glob("train.quarantine-*")
    lines = [json.loads(line) for line in left_out.read_text().splitlines()]
    assert {line["id"]: line["reason"] for line in lines} == dict.fromkeys(
        ("a#part2", "c"), "excluded: listed"
    )
    assert verify(str(tmp_path / TASK))[1] == []


def test_every_pair_is_in_the_cache_once_or_left_out_with_its_reason(make, rows, vocabulary):
    cache = make()
    loaded = load(str(vocabulary), 100)
    found = pairs_of(cache) | pairs_of(cache, "validation")
    assert set(found) == set(rows)
    for name, row in rows.items():
        assert list(found[name][0]) == loaded.encode([row["q"]])[0].tolist()
        assert list(found[name][1]) == loaded.encode([row["a"]])[0].tolist()
    texts = [path.read_text() for path in cache.glob("*.quarantine-*")]
    left_out = [json.loads(line) for text in texts for line in text.splitlines()]
    assert {entry["id"]: entry["reason"] for entry in left_out} == {
        "no answer": "empty targets",
        "null": "null",
        "no question": "empty inputs",
    }
    faults = verify(str(cache)).faults
    assert not faults
    manifest = CacheManifest.load(str(cache))
    counts = [shard.pairs for shards in manifest.splits.values() for shard in shards]
    assert sum(each.inputs_tokens for each in counts) == sum(len(i) for i, _ in found.values())
    assert max(each.longest_targets for each in counts) == max(len(t) for _, t in found.values())


@pytest.mark.parametrize("too_long", ["cut", "quarantine", "split"])
def test_pairs_that_are_too_long(make, too_long, capsys):
    whole = make()
    found = pairs_of(whole)
    cache = make(
        "--max_inputs=30", "--max_targets=9", f"--too_long={too_long}", "--max_quarantined=0.2",
        cache_dir=whole.parent.parent / "limited",
    )  # fmt: skip
    limited = pairs_of(cache)
    long = {name for name, (i, t) in found.items() if len(i) > 29 or len(t) > 8}
    assert 10 < len(long) < len(found) - 10
    manifest = CacheManifest.load(str(cache))
    counts = [shard.pairs for shard in manifest.splits["train"]]
    if too_long == "cut":
        assert limited == {name: (i[:29], t[:8]) for name, (i, t) in found.items()}
        for side, field, most in ((0, "cut_inputs", 29), (1, "cut_targets", 8)):
            cut = sum(len(pair[side]) > most for pair in found.values())
            assert sum(getattr(each, field) for each in counts) == cut
    elif too_long == "split":
        parts = {}
        for name, (i, t) in found.items():
            stretches = [
                [side[k : k + n] for k in range(0, len(side), n)] for side, n in ((i, 29), (t, 8))
            ]
            for k in range(max(map(len, stretches))):
                number = f"#part{k + 1}" if k else ""
                parts[name + number] = tuple(each[min(k, len(each) - 1)] for each in stretches)
        assert limited == parts
        assert manifest.total("train", "split_documents") == len(long)
        assert "split pairs" in capsys.readouterr().out
    else:
        assert limited == {name: pair for name, pair in found.items() if name not in long}
        dropped = manifest.dropped("train")
        assert dropped["inputs too long"] + dropped.get("targets too long", 0) == len(long)
    assert not verify(str(cache))[1]


def test_stretches_without_tokens_make_no_pairs(make, tmp_path):
    corpus = tmp_path / "corpus" / "a.jsonl"
    deleted = "\x01" * 60  # by the normalisation of SentencePiece
    rows = [
        {"id": "q", "q": f"{deleted} one two three {deleted}", "a": "yes"},
        {"id": "a", "q": "one two three " * 5, "a": f"yes {deleted} no"},
        {"id": "none", "q": deleted, "a": "yes"},
    ]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    cache = make(
        f"--corpus=json:{corpus}?inputs=q&targets=a&validation=0", "--max_document_bytes=40",
        "--too_long=split", "--max_quarantined=1",
    )  # fmt: skip
    found = pairs_of(cache)
    assert all(len(inputs) and len(targets) for inputs, targets in found.values())
    assert "q" in found
    assert "q#part2" not in found
    loaded = load(str(cache), 100)
    targets = [loaded.decode(np.array(found[name][1])) for name in ("a", "a#part2")]
    assert targets == ["yes", "no"]
    assert CacheManifest.load(str(cache)).dropped("train") == {"empty inputs": 1}
    assert not verify(str(cache))[1]


def test_a_side_of_many_bytes_is_cut_before_it_is_tokenized(make, tmp_path):
    corpus = tmp_path / "corpus" / "a.jsonl"
    corpus.write_text(json.dumps({"id": "x", "q": "word " * 1000, "a": "b"}) + "\n")
    flags = ["--max_document_bytes=400", "--too_long=cut"]
    cache = make(f"--corpus=json:{corpus}?inputs=q&targets=a&validation=0", *flags)
    ((inputs, _),) = pairs_of(cache).values()
    loaded = load(str(cache), 100)
    assert loaded.decode(np.array(inputs)) == ("word " * 80).strip()
    split = make(
        f"--corpus=json:{corpus}?inputs=q&targets=a&validation=0", flags[0], "--too_long=split",
        "--max_inputs=50", cache_dir=tmp_path / "split",
    )  # fmt: skip
    found = pairs_of(split)
    assert len(found) > 13
    texts = [loaded.decode(np.array(inputs)) for inputs, _ in found.values()]
    assert "".join(texts).replace(" ", "") == "word" * 1000
    assert {len(targets) for _, targets in found.values()} == {len(loaded.encode(["b"])[0])}
    with pytest.raises(UserError, match="no document with text"):
        make(
            f"--corpus=json:{corpus}?inputs=q&targets=a&validation=0",
            flags[0],
            cache_dir=tmp_path / "b",
        )


def test_damage_is_found(make):
    cache = make()
    path = sorted(cache.glob("train.tfrecord-*"))[0]
    flip(path)
    faults = verify(str(cache)).faults
    assert [fault.file for fault in faults] == [path.name]
    windows = row_windows(str(cache), CacheManifest.load(str(cache)), "train")
    with pytest.raises(UserError, match=f"{path.name} is corrupt in row"):
        windows.read(np.arange(len(windows)))


def test_a_wrong_index_is_found(make):
    cache = make()
    path = sorted(cache.glob("train.rows-*"))[0]
    index = np.load(path)
    index["inputs"][0] += 1
    np.save(path, index)
    name = path.name
    receipt = path.with_name(name.replace(".rows-", ".receipt-").replace(".npy", ".json"))
    entry = {"bytes": path.stat().st_size, "sha256": files.sha256(str(path))}
    value = json.loads(receipt.read_text())
    value["files"][name] = entry
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["splits"]["train"][0]["files"][name] = entry
    del manifest["sha256"]
    receipt.write_text(json.dumps(value))
    (cache / "manifest.json").write_text(json.dumps(sealed(manifest)))
    faults = verify(str(cache))[1]
    assert any("row 0 has different inputs in the records" in fault.what for fault in faults)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus=json:x.jsonl"], "qa_supervised reads pairs, but corpus json:x.jsonl has texts"),
        (["--task=ul2"], "has pairs of inputs and targets, but qa_ul2 reads texts"),
        (["--packing=best_fit"], "--packing is for texts"),
        (["--max_inputs=1"], "--max_inputs=1 leaves room for EOS alone"),
        (["--task=ul2", "--corpus=json:x.jsonl", "--too_long=cut"], "--too_long is for pairs"),
    ],
)
def test_mistakes(make, flags, message):
    with pytest.raises(UserError) as raised:
        make(*flags)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_objectives_and_caches_of_different_kinds(make, cache):
    of_pairs, lengths = make(), Lengths(64, 64)
    manifest = CacheManifest.load(str(of_pairs))
    with pytest.raises(UserError, match="holds pairs of inputs and targets, but this objective"):
        open_windows(str(of_pairs), manifest, "train", span_corruption(), lengths)
    texts = CacheManifest.load(str(cache))
    with pytest.raises(UserError, match="holds texts, but this objective reads pairs"):
        open_windows(str(cache), texts, "train", Supervised(), lengths)
    with pytest.raises(UserError, match=r"has inputs of up to .* set it to .*too_long=cut"):
        open_windows(str(of_pairs), manifest, "train", Supervised(), lengths)


def test_the_next_command_holds_the_longest_pair(make, capsys):
    make()
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("next: "))
    assert "--lengths.inputs=596" in line
    assert "--lengths.targets" not in line


@pytest.mark.parametrize("objective", ["lm", "autoregressive_lm", "full_lm", "decoder_prefix_lm"])
def test_the_next_command_of_texts_has_no_lengths_of_pairs(tmp_path, objective, capsys):
    (tmp_path / "a.txt").write_text("the red house\nthe old gate\n" * 9)
    build([f"--task={objective}", "--name=n", f"--corpus=text:{tmp_path}/a.txt",
                "--vocabulary=bytes", f"--cache_dir={tmp_path}/cache"])  # fmt: skip
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("next: "))
    assert "--lengths" not in line


def test_many_empty_sides_are_refused(make, tmp_path):
    rows = [{"id": f"{n}", "q": f"who wrote book {n}?", "a": ""} for n in range(300)]
    write_json(tmp_path / "corpus" / "b.jsonl", rows)
    with pytest.raises(UserError, match=r"% .* faulty \(\d+ empty targets, .*--max_quara.*=keep"):
        make()
    assert not (tmp_path / "cache" / TASK / "COMPLETED").exists()
    make("--max_quarantined=0.6")
    assert (tmp_path / "cache" / TASK / "COMPLETED").exists()


def test_empty_targets_are_kept_as_eos_alone(make, tmp_path, vocabulary):
    rows = [{"id": f"{n}", "q": f"who wrote book {n}?", "a": ""} for n in range(300)]
    write_json(tmp_path / "corpus" / "b.jsonl", rows)
    cache = make("--empty_targets=keep")
    manifest = CacheManifest.load(str(cache))
    assert manifest.dropped("train") == {"empty inputs": 1, "null": 1}
    found = pairs_of(cache) | pairs_of(cache, "validation")
    assert sum(not len(targets) for _, targets in found.values()) == 301
    assert verify(str(cache))[1] == []
    lengths, ids = Lengths(1000, 1000), load(str(vocabulary), 100).ids
    windows = open_windows(str(cache), manifest, "train", Supervised(), lengths)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    keys_W = np.zeros(len(tokens_WN), np.uint64)
    examples = Supervised().examples(tokens_WN, lengths_W, keys_W, lengths, ids)
    targets_WN, targets_W = examples["targets"]
    targets = [row[:length].tolist() for row, length in zip(targets_WN, targets_W, strict=True)]
    assert [EOS_ID] in targets
    assert all(row[-1] == EOS_ID for row in targets)
