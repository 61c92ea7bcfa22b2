"""Planted duplicates are found, and the list depends on the corpus alone."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from pipeline.annexes.deduplication import dedup, engine
from pipeline.exclusion.lists import CONTAMINATED, EXACT, NEAR, ExcludeList
from tasks.terminal.command_line import UserError
from tests.pipeline.annexes.deduplication.texts import entries, search, sha256, words, write
from tests.support.plain_records import without_plan
from tests.support.processes import wait_for
from tests.support.servers.gcs import GcsServer

ROOT = pathlib.Path(__file__).parents[3]


def planted(count=60):
    """Returns texts of which some are exact and some near duplicates, and the wanted entries."""
    texts, wanted = [], {}
    for number in range(count):
        text = words(200, number)
        texts.append((f"doc{number}", " ".join(text)))
        if number % 3 == 0:
            texts.append((f"same{number}", "\n ".join(text).upper() + " \t"))
            wanted[f"same{number}"] = (EXACT, f"doc{number}")
        if number % 3 == 1:
            texts.append((f"like{number}", " ".join([*text[:100], "other", *text[101:]])))
            wanted[f"like{number}"] = (NEAR, f"doc{number}")
    texts += [("blank", " \n"), ("dots", "..."), ("empty", "")]
    return texts, wanted


def test_planted_duplicates_are_listed(tmp_path, capsys):
    texts, wanted = planted()
    found = search(write(tmp_path / "c.jsonl", texts), tmp_path / "out")
    assert entries(found, [name for name, _ in texts]) == wanted
    keys = [(row["high"], row["low"]) for row in found]
    assert keys == sorted(keys)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["counts"]["documents"] == len(texts)
    assert (report["counts"]["exact"], report["counts"]["near"]) == (20, 20)
    assert report["clusters"] == {"2": 40}
    # Of 20 pairs whose similarity, 0.95, is far above 0.72.
    assert 0 < report["false_positives"] < 1e-4
    out = capsys.readouterr().out
    assert re.search(r"listed +40 \(38\.8%\)", out)
    assert sorted(os.listdir(tmp_path / "out")) == ["exclude.arrow", "plan.json", "report.json"]
    search(write(tmp_path / "c.jsonl", texts), tmp_path / "out")
    assert "nothing to do" in capsys.readouterr().out


def test_the_list_does_not_depend_on_pieces_and_partitions(tmp_path, monkeypatch):
    corpus = write(tmp_path / "c.jsonl", planted()[0])

    def found(size, name):
        return str(list(search(corpus, tmp_path / name, f"--shard_bytes={size}")))

    lists = {found(size, str(size)) for size in (3_000, 40_000, 10**6)}
    monkeypatch.setattr("pipeline.annexes.deduplication.plan._PARTITION", 1)
    assert {found(10_000, "partitions")} == lists


def test_a_chain_of_twins_keeps_the_first(tmp_path):
    text = words(300, 0)
    texts = [("c", " ".join(words(100, 9)))]
    for number in range(6):
        texts.append((f"t{number}", " ".join([*text[20 * number :], *words(20 * number, number)])))
    found = search(write(tmp_path / "c.jsonl", texts), tmp_path / "out", "--bands=60", "--rows=4")
    assert set(entries(found, [name for name, _ in texts]).values()) == {(NEAR, "t0")}


def test_min_similarity_drops_unlike_pairs(tmp_path, capsys):
    text = words(200, 0)
    half = " ".join([*text[:100], *words(100, 1)])  # similarity a third
    near = " ".join([*text[:150], "other", *text[151:]])
    texts = [("a", " ".join(text)), ("half", half), ("near", near)]
    flags = ("--bands=112", "--rows=1")  # one equal value is enough
    corpus = write(tmp_path / "c.jsonl", texts)
    names = [name for name, _ in texts]
    assert set(entries(search(corpus, tmp_path / "all", *flags), names)) == {"half", "near"}
    some = search(corpus, tmp_path / "some", *flags, "--min_similarity=0.7")
    assert set(entries(some, names)) == {"near"}
    (row,) = some
    assert abs(row["similarity"] - 191 / 201) < 0.1


def test_parts_of_a_long_document_are_one_unit(tmp_path):
    text = " ".join(words(2000, 0))
    texts = [("long", text), ("twin", text.upper()), ("other", " ".join(words(2000, 1)))]
    found = search(write(tmp_path / "c.jsonl", texts), tmp_path / "o", "--max_document_bytes=3000")
    assert entries(found, [name for name, _ in texts]) == {"twin": (EXACT, "long")}


@pytest.mark.parametrize("first", ["", "other text\n"])
def test_a_document_that_begins_with_a_blank_part_is_one(tmp_path, first):
    """Blank parts of a text are left out, so such a document begins with its second part."""
    text = " ".join(words(60, 0))
    (tmp_path / "a.txt").write_text(f"{first}{' ' * 1001}{text}\n{text}\nlast\n")
    flags = ("--max_document_bytes=1000",)
    found = search(f"text:{tmp_path}/a.txt", tmp_path / "o", *flags)
    (row,) = found
    assert (row["reason"], row["twin"]) == (EXACT, f"a.txt:{len(first)}")
    search(f"text:{tmp_path}/a.txt", tmp_path / "p", *flags, "--unit=paragraph")
    for output in ("o", "p"):
        report = json.loads((tmp_path / output / "report.json").read_text())
        assert report["counts"]["documents"] == 3 + bool(first)


def test_documents_of_equal_ids_are_told_apart(tmp_path, build):
    text = " ".join(words(100, 0))
    texts = [("x", text), ("x", text), ("x", " ".join(words(100, 1))), ("y", text)]
    corpus = write(tmp_path / "c.jsonl", texts)
    found = search(corpus, tmp_path / "out")
    assert sorted(row["place"] > 0 for row in found) == [False, True]
    path = tmp_path / "out" / "exclude.arrow"
    more = (f"--corpus={corpus}?validation=0", f"--exclude={path}")
    cache = build(tmp_path / "cache", *more)
    lines = [json.loads(line) for line in next(cache.glob("train.quar*")).read_text().splitlines()]
    assert [(line["id"], line["reason"]) for line in lines] == [("x", EXACT), ("y", EXACT)]
    assert lines[0]["location"] == f"c.jsonl:{len(json.dumps({'id': 'x', 'text': text})) + 1}"


@pytest.mark.parametrize("flag", [["--min_similarity=1"], ["--bands=1", "--rows=2"]])
def test_no_false_positives_are_expected_where_similarities_of_1_are_wanted(tmp_path, capsys, flag):
    search(write(tmp_path / "c.jsonl", planted()[0]), tmp_path / "out", *flag)
    assert "false positives" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["false_positives"] is None


def test_the_first_clean_member_of_a_cluster_is_kept(tmp_path):
    question, page = words(20, 1), words(200, 2)
    sets = write(tmp_path / "eval.jsonl", [("q", " ".join(question))])
    texts = [
        ("both", " ".join(page + question)), ("page", " ".join(page)),
        ("again", " ".join(page)), ("question", " ".join(page + question)),
    ]  # fmt: skip
    corpus = write(tmp_path / "c.jsonl", texts)
    found = entries(search(corpus, tmp_path / "a", f"--against={sets}"), dict(texts))
    assert found == {
        "both": (CONTAMINATED, f"{sets}:q"),
        "again": (EXACT, "page"),
        "question": (CONTAMINATED, f"{sets}:q"),
    }


def test_exact_duplicates_are_those_of_the_kept_text(tmp_path):
    page = words(200, 1)
    other = " ".join([*page[:190], *words(10, 2)])
    texts = [("first", " ".join(page)), ("near", other), ("equal", other), ("same", " ".join(page))]
    found = entries(search(write(tmp_path / "c.jsonl", texts), tmp_path / "a"), dict(texts))
    assert found == {
        "near": (NEAR, "first"), "equal": (NEAR, "first"), "same": (EXACT, "first"),
    }  # fmt: skip


def test_contaminated_documents_are_listed(tmp_path, capsys):
    question = words(30, 0)
    phrase = words(13, 1)  # in many documents, as a common phrase is
    sets = write(tmp_path / "eval.jsonl", [
        ("q0", " ".join(question)), ("q1", " ".join(phrase)), ("q2", "too short"),
    ])  # fmt: skip
    texts = [(f"d{number}", " ".join(words(50, 100 + number) + phrase)) for number in range(11)]
    texts += [
        ("one", " ".join([*words(50, 50), *question[5:18], *words(50, 51)])),
        ("less", " ".join([*words(50, 52), *question[5:17], *words(50, 53)])),
        ("whole", "So: " + ", ".join(question).upper() + "?"),
    ]
    corpus = write(tmp_path / "c.jsonl", texts)
    names = [name for name, _ in texts]
    found = search(corpus, tmp_path / "a", f"--against={sets}")
    listed = {name: reason for name, (reason, _) in entries(found, names).items()}
    assert listed == {"one": CONTAMINATED, "whole": CONTAMINATED}
    assert {twin for _, twin in entries(found, names).values()} == {f"{sets}:q0"}
    assert "3 examples, 1 shorter than 13 words" in capsys.readouterr().out
    every = search(corpus, tmp_path / "b", f"--against={sets}", "--common=0")
    assert len(every) == 13
    flags = ("--ngram=8", "--overlap=0.7", "--duplicates=none")
    whole = search(corpus, tmp_path / "c", f"--against={sets}", *flags)
    assert set(entries(whole, names)) == {"whole"}
    assert whole.header["kind"] == "ids"


def test_pairs_are_compared_by_both_sides(tmp_path, vocabulary):
    from pipeline.build import main

    rows = [{"id": f"p{n}", "q": " ".join(words(30, n)), "a": " ".join(words(9, -n))}
            for n in range(1, 9)]  # fmt: skip
    rows += [
        {**rows[2], "id": "same"},
        {**rows[3], "id": "other answer", "a": " ".join(words(60, 99))},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = f"json:{tmp_path}/c.jsonl?inputs=q&targets=a"
    found = search(corpus, tmp_path / "out")
    assert entries(found, [row["id"] for row in rows]) == {"same": (EXACT, "p3")}
    flags = ("--task=supervised", "--name=qa", f"--vocabulary={vocabulary}", "--extra_ids=100")
    exclude = f"--exclude={tmp_path}/out/exclude.arrow"
    main([*flags, f"--corpus={corpus}&validation=0", f"--cache_dir={tmp_path}/cache", exclude])
    receipt = next((tmp_path / "cache" / "qa_supervised").glob("train.receipt*"))
    value = json.loads(receipt.read_text())
    assert (value["documents"], value["dropped"]) == (9, {EXACT: 1})


@pytest.mark.google
def test_a_search_and_a_takedown_in_a_failing_bucket(tmp_path, in_bucket, build):
    texts, _ = planted(30)
    corpus = write(tmp_path / "c.jsonl", texts)
    reference = search(corpus, tmp_path / "out", "--shard_bytes=20000")
    expected = sha256(tmp_path / "out" / "exclude.arrow")
    (tmp_path / "ids.txt").write_text("doc0\ndoc3\n")
    here = build(tmp_path / "cache", f"--corpus={corpus}?validation=0", "--shard_bytes=20000",
                 f"--exclude={reference.path},{tmp_path}/ids.txt")  # fmt: skip
    with GcsServer(faults=0.1, seed=2) as gcs:
        in_bucket(gcs)
        gcs.store.put("bucket", "corpus/c.jsonl", (tmp_path / "c.jsonl").read_bytes(), {}, {})
        gcs.store.put("bucket", "ids.txt", (tmp_path / "ids.txt").read_bytes(), {}, {})
        there = "json:gs://bucket/corpus/c.jsonl"
        dedup.main([f"--corpus={there}", "--output=gs://bucket/out", "--shard_bytes=20000"])
        assert {name for name in gcs.names() if name.startswith("out/")} == {
            "out/exclude.arrow", "out/plan.json", "out/report.json",
        }  # fmt: skip
        (tmp_path / "copy").write_bytes(gcs.read("out/exclude.arrow"))
        assert list(ExcludeList(str(tmp_path / "copy"))) == list(reference)
        given = (f"--corpus={there}?validation=0", "--shard_bytes=20000")
        build("gs://bucket/cache", *given, f"--exclude={reference.path}")
        build("gs://bucket/cache", *given, "--exclude=gs://bucket/ids.txt")
        for path in here.glob("train.*"):
            there, read = gcs.read(f"cache/{here.name}/{path.name}"), path.read_bytes()
            if ".receipt-" in path.name:
                there, read = without_plan(there), without_plan(read)
            assert there == read, path.name
    assert sha256(tmp_path / "out" / "exclude.arrow") == expected


# Independent of the kernels: words, shingles and n-grams by Python's own strings.
def python_words(text):
    return re.findall(r"[^\W_]+", text.lower())


def test_signatures_estimate_jaccard_similarity(tmp_path):
    rules = engine.Options(corpus="", output="").rules
    from pipeline.annexes.deduplication import kernels
    from pipeline.annexes.deduplication.contamination import Words

    texts = [" ".join(words(400, 0)), *(
        " ".join([*words(400, 0)[: 400 - 10 * cut], *words(10 * cut, cut)]) for cut in range(1, 30)
    )]  # fmt: skip
    data = np.frombuffer("".join(texts).encode(), np.uint8)
    ends = np.cumsum([len(text.encode()) for text in texts])
    begins = ends - [len(text.encode()) for text in texts]
    hashed, bounds, _ = Words()(data, begins, ends)
    assert np.diff(bounds).tolist() == [len(python_words(text)) for text in texts]
    sketches = np.empty((len(texts), 2048), np.uint32)
    factors = kernels.gram_factors(rules.shingle)
    kernels.minhash(hashed, bounds, rules.shingle, factors, *kernels.multipliers(2048), sketches)
    shingles = [
        {tuple(found[at : at + 5]) for at in range(len(found) - 4)}
        for found in map(python_words, texts)
    ]
    true = [len(shingles[0] & other) / len(shingles[0] | other) for other in shingles]
    estimated = (sketches == sketches[0]).mean(1)
    assert np.abs(estimated - true).max() < 0.045  # four standard errors


@pytest.mark.parametrize("settings", [{}, {"min_similarity": 0.8}, {"bands": 1, "rows": 3}])
def test_expected_false_positives(settings):
    rules = engine.Options(corpus="", output="", **settings).rules
    wanted = rules.wanted
    assert wanted == settings.get("min_similarity", (1 / rules.bands) ** (1 / rules.rows))
    # Drawn: similarities, then how many values of a signature are equal.
    generator = np.random.default_rng(0)
    similarities = generator.random(1 << 20)
    equal = generator.binomial(rules.hashes, similarities + (1 - similarities) / 256)
    of_equal = np.bincount(equal, minlength=rules.hashes + 1)
    unlike = np.bincount(equal, similarities < wanted, minlength=rules.hashes + 1)
    error = np.abs(rules.unlike() - unlike / of_equal)
    assert (error < 5 * np.sqrt(0.25 / of_equal)).all()


def test_false_positives_of_the_longest_signatures():
    found = engine.Options(corpus="", output="", bands=4096, rows=16).rules.unlike()
    assert ((found >= 0) & (found <= 1)).all()
    assert (found[0], found[-1]) == (1, 0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Ștefan cel Mare, 1457–1504", 5),
        ("e\u0301te\u0301 naïve Straße", 3),
        ("日本語 and ไทย", 7),
        ("a_b don't", 4),
        ("\ufeff\x00 \u3000", 0),
        ("🙂 𝒳", 1),
    ],
)
def test_words(text, count):
    from pipeline.annexes.deduplication.contamination import Words

    data = np.frombuffer(text.encode(), np.uint8)
    _, bounds, exact = Words()(data, np.array([0]), np.array([len(data)]))
    assert bounds.tolist() == [0, count]
    upper = np.frombuffer(f" {text.swapcase()}\n".replace(" ", "  ").encode(), np.uint8)
    _, _, other = Words()(upper, np.array([0]), np.array([len(upper)]))
    if text.lower() == text.swapcase().lower():
        assert (exact == other).all()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--duplicates=none"], "looks for nothing"),
        (["--against= "], "--against is empty"),
        (["--bands=100000", "--rows=1000"], "must be 65,536 or less"),
        (["--min_similarity=0.5"], "min_similarity: 0.5, there: 0.0"),
        (["--shard_bytes=1000"], "shard_bytes"),
    ],
)
def test_mistakes_are_named(tmp_path, flags, problem):
    corpus = write(tmp_path / "c.jsonl", planted(3)[0])
    search(corpus, tmp_path / "out")
    with pytest.raises(UserError, match=problem):
        search(corpus, tmp_path / "out", *flags)


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match=r"holds mine but no plan\.json"):
        search(write(tmp_path.parent / "c.jsonl", planted(3)[0]), tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("moments", "alone"),
    [
        (["signatures-00004*"], True),
        pytest.param(
            ["signatures-00000*", "signatures-00004*", "edges-*"], False, marks=pytest.mark.slow
        ),
    ],
)
def test_workers_and_kills_do_not_change_the_list(tmp_path, moments, alone):
    """Two workers are killed at some moments; this process `alone`, or two more, finish."""
    texts, wanted = planted(300)
    corpus = write(tmp_path / "c.jsonl", texts)
    flags = ["--shard_bytes=40000"]
    dedup.main([f"--corpus={corpus}", f"--output={tmp_path / 'one'}", *flags])
    reference = sha256(tmp_path / "one" / "exclude.arrow")
    assert len(ExcludeList(str(tmp_path / "one" / "exclude.arrow"))) == len(wanted)
    output = tmp_path / "two"
    flags = [f"--corpus={corpus}", f"--output={output}", *flags]
    command = [sys.executable, "-m", "pipeline.annexes.deduplication.dedup", "--workers=2", *flags]
    killed = 0
    for awaited in moments:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        wait_for(lambda name=awaited: any(output.glob(name)), process)
        killed += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
    assert killed
    if alone:
        dedup.main(flags)
    else:
        subprocess.run(command, cwd=ROOT, check=True)
    assert sha256(output / "exclude.arrow") == reference
    assert sorted(os.listdir(output)) == ["exclude.arrow", "plan.json", "report.json"]


def test_a_search_in_parts(corpus, tmp_path, capsys):
    def search(folder, *more):
        given = f"--corpus={corpus}", f"--output={tmp_path / folder}", "--shard_bytes=100000"
        dedup.main([*given, *more])
        return capsys.readouterr().out

    search("whole")
    said = search("parts", "--part=2/3")
    assert "part 1 of 3 has not run: 4 of its 4 pieces are missing" in said
    search("parts", "--part=2/3")  # again
    search("parts", "--part=0/3")
    assert not (tmp_path / "parts" / "exclude.arrow").exists()
    assert "exact duplicates" in search("parts", "--part=1/3")
    for name in ("exclude.arrow", "plan.json"):
        parts, whole = ((tmp_path / each / name).read_bytes() for each in ("parts", "whole"))
        assert parts == whole
    assert sorted(os.listdir(tmp_path / "parts")) == sorted(os.listdir(tmp_path / "whole"))
    assert "nothing to do" in search("parts", "--part=3/3")


def test_several_corpora_and_evaluation_sets(tmp_path, capsys):
    folder = tmp_path / "two words"
    folder.mkdir()
    texts = {
        name: [(f"{name}{n}", " ".join(words(20, f"{name}{n}"))) for n in range(5)]
        for name in "abc"
    }
    texts["b"][2] = "b2", texts["a"][1][1].upper()
    texts["c"][4] = "c4", texts["b"][3][1].upper()
    flags = [f"--corpus={name}={write(folder / name, texts[name])}" for name in "abc"]
    against = [write(folder / f"test {n}.jsonl", [texts["c"][n]]) for n in range(2)]
    dedup.main([*flags, *(f"--against={each}" for each in against), f"--output={tmp_path}/out"])
    assert re.search(r"against json:.*two\+?.*0.jsonl +1 examples", capsys.readouterr().out)
    found = list(ExcludeList(f"{tmp_path}/out/exclude.arrow"))
    assert sorted(row["twin"][:2] for row in found) == ["a:", "b:", "js", "js"]
    dedup.main([*flags, f"--against={' '.join(against)}", f"--output={tmp_path}/again"])
    assert str(list(ExcludeList(f"{tmp_path}/again/exclude.arrow"))) == str(found)
