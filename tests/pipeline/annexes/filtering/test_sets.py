"""--filter in builds: accounts, fingerprints, reports, dry runs, takedowns."""

import json
import pathlib
import re
import shutil
from collections import Counter

import pytest
from pyarrow import parquet

from pipeline.build import main
from pipeline.verification.cache import verify
from tasks import annexes
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError

GIVEN = ("--filter=gopher_quality?min_words=10&min_stop_words=1", "--filter=c4,pii")
SMALL = "--shard_bytes=50000"

needs_dry_runs = pytest.mark.skipif(not annexes.entries("dry_runs"), reason="no dry runs")


@pytest.fixture(scope="module")
def filtered(flags, tmp_path_factory) -> pathlib.Path:
    """Returns a finished, filtered cache, which tests must not change."""
    folder = tmp_path_factory.mktemp("filtered")
    main(flags(folder, SMALL, *GIVEN))
    return next(folder.iterdir())


def kept(cache) -> list[str]:
    paths = sorted(cache.glob("*.documents-*"))
    return [name for path in paths for name in parquet.read_table(path)["id"].to_pylist()]


def left_out(cache) -> list[dict]:
    texts = [path.read_text() for path in sorted(cache.glob("*.quarantine-*"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_every_document_is_kept_or_left_out_once(filtered, documents):
    lines = left_out(filtered)
    assert Counter([*kept(filtered), *(line["id"] for line in lines)]) == Counter(list(documents))
    assert verify(str(filtered))[1] == []
    manifest = CacheManifest.load(str(filtered))
    dropped = sum((Counter(manifest.dropped(split)) for split in manifest.splits), Counter())
    assert dropped == Counter(line["reason"] for line in lines)
    assert {"filtered: gopher_quality min_words", "filtered: c4 min_sentences"} <= set(dropped)
    few = next(line for line in lines if line["reason"].endswith("min_words"))
    assert few["value"] < 10
    assert any(line.get("text") for line in lines)
    edits = Counter()
    for shards in manifest.splits.values():
        for shard in shards:
            edits.update(shard.edits or {})
    assert edits["c4 lines"] > 100


def test_filters_are_in_the_fingerprint(filtered, build, tmp_path):
    plan = CacheManifest.load(str(filtered)).plan
    assert [each.name for each in plan.filters] == ["gopher_quality", "c4", "pii"]
    shutil.copytree(filtered, tmp_path / filtered.name)
    for given in ((), (GIVEN[0],), (GIVEN[0], "--filter=pii,c4"), ("--filter=gopher_quality",)):
        with pytest.raises(UserError, match="different plan"):
            build(tmp_path, SMALL, *given)


def test_a_build_without_filters_has_the_plan_that_it_always_had(cache):
    plan = json.loads((cache / "plan.json").read_text())
    assert "filters" not in plan
    assert not any("edits" in path.read_text() for path in cache.glob("*.receipt-*"))


@needs_dry_runs
def test_a_dry_run_tells_what_each_rule_drops(filtered, build, tmp_path, capsys):
    build(tmp_path, SMALL, *GIVEN, "--dry_run")
    assert not list(tmp_path.iterdir())
    out = capsys.readouterr().out
    first = Counter(line["reason"] for line in left_out(filtered))
    told = {
        next(reason for reason in first if reason in line): line
        for line in out.splitlines()
        if any(reason in line for reason in first)
    }
    for reason, count in first.items():
        if reason.startswith("filtered: "):
            alone, counted = told[reason].removeprefix(reason).split()[-2:]
            assert int(counted.replace(",", "")) == count <= int(alone.replace(",", ""))


def test_the_report_counts_and_shows_what_was_dropped(filtered, tmp_path):
    report = pytest.importorskip("pipeline.annexes.report.report").main
    report([f"--cache={filtered}", f"--output={tmp_path / 'page.html'}"])
    page = (tmp_path / "page.html").read_text()
    line = next(line for line in left_out(filtered) if line.get("text", "") > "a")
    assert line["reason"] in page
    assert "c4 lines" in page
    assert line["text"].split()[0] in page


def test_a_takedown_of_a_filtered_cache_is_a_build_with_the_list(
    filtered, build, tmp_path, checksums
):
    path = tmp_path / "ids.txt"
    path.write_text("\n".join([kept(filtered)[0], left_out(filtered)[0]["id"]]))
    cache = tmp_path / "a" / filtered.name
    shutil.copytree(filtered, cache)
    build(tmp_path / "a", SMALL, *GIVEN, f"--exclude={path}")
    for folder in cache.glob(".before-*"):
        shutil.rmtree(folder)
    other = build(tmp_path / "b", SMALL, *GIVEN, f"--exclude={path}")
    assert checksums(cache) == checksums(other)


def test_a_function_of_the_users_filters(build, tmp_path, monkeypatch, documents):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_filter.py").write_text(
        "import pyarrow.compute as pc\n"
        "def keep(texts):\n"
        "    return pc.if_else(pc.match_substring(texts, 'Return'), 'has Return', None)\n"
    )
    cache = build(tmp_path / "c", "--task_module=my_filter", "--filter=function?name=keep")
    names = {line["id"] for line in left_out(cache) if "has Return" in line["reason"]}
    assert names == {name for name, text in documents.items() if "Return" in text}


PAIRS = [
    {"id": "kept", "inputs": "one two three", "targets": "unu doi trei"},
    {"id": "same", "inputs": " one two", "targets": "one two\n"},
    {"id": "far", "inputs": "one two three four five", "targets": "unu doi"},
    {"id": "long words", "inputs": "one", "targets": "unu" * 9},
    {"id": "digits", "inputs": "12 34 56", "targets": "doi trei patru"},
    {"id": "digits there", "inputs": "twelve and some", "targets": "12 34 56"},
    {"id": "mail", "inputs": "write to me@some.org", "targets": "scrie la eu@some.org"},
    {"id": "empty", "inputs": "one", "targets": " "},
    {"id": "null", "inputs": None, "targets": "unu"},
]
OF_PAIRS = (
    "--filter=pairs?max_word_ratio=2&max_character_ratio=5",
    "--filter=characters?max_digits=0.1&side=inputs",
    "--filter=pii",
)


@pytest.fixture
def pairs(build, tmp_path):
    """Returns a function that builds a cache of PAIRS with some flags."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))

    def run(*given):
        build(
            tmp_path / "c", "--task=supervised", "--name=own", "--max_quarantined=1", *given,
            f"--corpus=json:{path}?inputs=inputs&targets=targets&validation=0",
        )  # fmt: skip
        return tmp_path / "c" / "own_supervised"

    return run


def test_pairs_are_filtered_by_both_sides(pairs, tmp_path):
    cache = pairs(*OF_PAIRS)
    assert kept(cache) == ["kept", "digits there", "mail"]
    lines = {line["id"]: line for line in left_out(cache)}
    assert {name: line["reason"] for name, line in lines.items()} == {
        "same": "filtered: pairs drop_identical",
        "far": "filtered: pairs max_word_ratio",
        "long words": "filtered: pairs max_character_ratio",
        "digits": "filtered: characters max_digits of inputs",
        "empty": "empty targets",
        "null": "null",
    }
    assert (lines["far"]["value"], lines["long words"]["value"]) == (2.5, 9)
    assert lines["far"]["text"] == "one two three four five ||| unu doi"
    assert lines["digits"]["value"] == pytest.approx(6 / 8)
    (receipt,) = cache.glob("train.receipt-*")
    edits = json.loads(receipt.read_text())["edits"]
    assert edits == {"pii e-mail addresses of inputs": 1, "pii e-mail addresses of targets": 1}
    assert verify(str(cache))[1] == []


def test_a_set_judges_each_side_of_a_pair(pairs):
    cache = pairs("--filter=characters?max_digits=0.1")
    reasons = {line["id"]: line["reason"] for line in left_out(cache)}
    assert reasons["digits"] == "filtered: characters max_digits of inputs"
    assert reasons["digits there"] == "filtered: characters max_digits of targets"


def test_one_set_for_each_side(pairs):
    cache = pairs(
        "--filter=length?max_words=2&side=inputs", "--filter=length?max_words=3&side=targets"
    )
    assert kept(cache) == ["same", "long words"]


def test_a_function_of_the_users_sees_both_sides(pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair_filter.py").write_text(
        "def same_start(inputs, targets):\n"
        "    rows = zip(inputs.to_pylist(), targets.to_pylist())\n"
        "    return [None if i.strip()[:1] == t[:1] else 'other start' for i, t in rows]\n"
        "def with_unu(texts):\n"
        "    return ['unu' if 'unu' in text else None for text in texts.to_pylist()]\n"
    )
    cache = pairs(
        *("--task_module=pair_filter", "--filter=function?name=with_unu&side=targets&label=unu"),
        "--filter=function?name=same_start",
    )
    reasons = {line["id"]: line["reason"] for line in left_out(cache)}
    assert reasons["kept"] == "filtered: unu unu of targets"
    assert reasons["digits"] == "filtered: function other start"
    assert kept(cache) == ["same"]


def test_filters_that_leave_nothing_are_named(pairs):
    with pytest.raises(UserError, match="left out: 8 filtered: length min_words of inputs, 1 null"):
        pairs("--filter=length?min_words=100")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("pairs?drop_identical=false", "drops nothing: give a rule, such as pairs.max_char"),
        ("pairs?max_word_ratio=0.5", "max_word_ratio must be 1 or more, not 0.5"),
        ("pairs?side=inputs", "side must be both, not inputs"),
        ("pii?side=input", "side must be inputs, targets or both, not input"),
        ("pii --filter=pii?side=inputs", "two sets are called pii"),
    ],
)
def test_wrong_filters_of_pairs(pairs, given, problem):
    with pytest.raises(UserError, match=problem):
        pairs(*f"--filter={given}".split(" "))


def test_edits_are_counted_of_what_can_be_used(build, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": null}\n{"text": "x"}\n{"text": null}\n')
    cache = build(
        tmp_path / "c", f"--corpus=json:{path}?validation=0", "--max_quarantined=1",
        "--filter=replace?pattern=^&replacement=Q: ",
    )  # fmt: skip
    (receipt,) = cache.glob("train.receipt-*")
    assert json.loads(receipt.read_text())["edits"] == {"replace texts changed": 1}


def test_a_changed_threshold_is_named(pairs):
    pairs("--filter=length?min_words=1", "--filter=pii")
    for given, what in (
        (["length?min_words=2", "pii"], r"filters.length.settings.min_words: 2, there: 1"),
        (["length?min_words=1"], r"filters.pii: null, there: "),
        (["pii", "length?min_words=1"], r"order of filters: ..pii., .length.., there: "),
    ):
        with pytest.raises(UserError, match=what):
            pairs(*(f"--filter={each}" for each in given))


def test_a_changed_threshold_of_one_side_is_named(pairs):
    given = "--filter=length?side={}&min_words={}".format
    pairs(given("inputs", 1), given("targets", 1))
    with pytest.raises(UserError, match=r"length of inputs.settings.min_words: 2, there: 1"):
        pairs(given("inputs", 2), given("targets", 1))


@pytest.mark.parametrize("given", ["pairs", "pii?side=inputs"])
def test_texts_have_no_sides(build, tmp_path, given):
    with pytest.raises(UserError, match="but the corpus has texts"):
        build(tmp_path / "c", f"--filter={given}")


@needs_dry_runs
def test_a_sample_of_which_nothing_is_kept(build, tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a few words"] * 40}), tmp_path / "a.parquet")
    corpus = f"--corpus=parquet:{tmp_path}/a.parquet"
    build(tmp_path / "cache", corpus, "--dry_run", "--filter=length?min_words=100")
    documents = re.search(r"^documents.*", capsys.readouterr().out, re.M)
    assert documents[0].split()[1:] == ["0", "0"]
