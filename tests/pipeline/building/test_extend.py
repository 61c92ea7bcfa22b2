"""--extend: new files become new shards, old shards keep their bytes, even if builds are killed."""

import dataclasses
import json
import os
import shutil

import pytest

from pipeline.building import lifecycle
from pipeline.verification.cache import verify
from tasks.cache.manifest import CacheManifest, as_json
from tasks.storage import files
from tasks.terminal.command_line import UserError


class Killed(BaseException):
    """Simulates SIGKILL: no code catches it."""


def write(folder, name, documents, copies=1):
    texts = list(documents.items()) * copies
    lines = [
        json.dumps({"id": f"{name}-{id}-{n}", "text": text}) for n, (id, text) in enumerate(texts)
    ]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines) + '\n{"text": null}\n')


@pytest.fixture
def growing(tmp_path, documents):
    """Returns (a folder with one file, a function that adds another)."""
    some = dict(list(documents.items())[:100])
    folder = tmp_path / "corpus"
    write(folder, "b.jsonl", some)
    return folder, lambda name, copies=1: write(folder, name, some, copies)


def flag(folder, validation=0.1):
    return f"--corpus=json:{folder}/**/*.jsonl?split=train&validation={validation}"


def state(folder):
    """Returns inode and modification time of every data file, by the file's number and kind."""
    return {
        path.name.split("-of-")[0]: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if "-of-" in path.name and "receipt" not in path.name
    }


def test_new_files_become_new_shards(build, tmp_path, growing, checksums, capsys):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder))
    before, old = state(cache), CacheManifest.load(str(cache))
    add("a.jsonl", copies=3)  # sorts before the old file
    added = r"1 files of this corpus, which now has 2 .*1 added: a.jsonl.*: pass --extend"
    with pytest.raises(UserError, match=added):
        build(tmp_path / "cache", flag(folder))
    assert (cache / "COMPLETED").exists()
    capsys.readouterr()
    build(tmp_path / "cache", flag(folder), "--extend")
    assert "kept" in capsys.readouterr().out

    manifest = CacheManifest.load(str(cache))
    assert manifest.plan.generations == [["b.jsonl"], ["a.jsonl"]]
    after = state(cache)
    assert before.items() <= after.items()
    for split, count in manifest.plan.shards.items():
        assert count > old.plan.shards[split]
        assert json.loads((cache / f"info.{split}.json").read_text())["num_shards"] == count
        names = sorted(path.name for path in cache.glob(f"{split}.tfrecord-*"))
        assert names == [f"{split}.tfrecord-{n:05d}-of-{count:05d}" for n in range(count)]
        assert manifest.total(split, "documents") > 3 * old.total(split, "documents")
    assert not verify(str(cache))[1]

    capsys.readouterr()
    build(tmp_path / "cache", flag(folder))
    assert "nothing to do" in capsys.readouterr().out


def test_an_extended_cache_equals_a_build_of_the_same_generations(
    build, tmp_path, growing, checksums
):
    folder, add = growing
    build(tmp_path / "cache", flag(folder))
    for name in ("c.jsonl", "a.jsonl"):
        add(name, copies=4)
        cache = build(tmp_path / "cache", flag(folder), "--extend")
    (tmp_path / "scratch" / cache.name).mkdir(parents=True)
    for path in (cache / "plan.json", *cache.glob(".plan-*")):
        shutil.copy(path, tmp_path / "scratch" / cache.name)
    scratch = build(tmp_path / "scratch", flag(folder))
    assert checksums(scratch) == checksums(cache)
    assert CacheManifest.load(str(cache)).plan.corpus["generations"] == [1, 1, 1]


@pytest.mark.processes
def test_a_kill_between_any_two_steps(build, tmp_path, growing, checksums, monkeypatch):
    folder, add = growing
    start = build(tmp_path / "start", flag(folder))
    add("a.jsonl")
    shutil.copytree(start, tmp_path / "expected" / start.name)
    expected = checksums(build(tmp_path / "expected", flag(folder), "--extend"))
    steps, killed = 0, True
    while killed:
        cache = tmp_path / str(steps) / start.name
        shutil.copytree(start, cache)
        before = state(cache)
        with monkeypatch.context() as patch:
            left = [steps]
            for name in ("replace", "unlink"):
                patch.setattr(os, name, lethal(getattr(os, name), left))
            try:
                build(cache.parent, flag(folder), "--extend")
                killed = False
            except Killed:
                pass
        assert not killed or not (cache / "COMPLETED").exists() or steps == 0
        build(cache.parent, flag(folder), "--extend")
        assert checksums(cache) == expected
        assert before.items() <= state(cache).items()
        shutil.rmtree(cache)
        steps += 1
    assert steps > 20


def lethal(function, left):
    def step(*arguments, **options):
        if str(arguments[0]).endswith(".lock"):  # of a killed process, the kernel releases it
            return function(*arguments, **options)
        if not left[0]:
            raise Killed
        left[0] -= 1
        return function(*arguments, **options)

    return step


def test_an_unfinished_cache_is_extended(build, tmp_path, growing):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder))
    for name in ("COMPLETED", "manifest.json", "train.receipt-00000-of-00001.json"):
        (cache / name).unlink()
    before = state(cache)
    add("a.jsonl")
    build(tmp_path / "cache", flag(folder), "--extend")
    assert not verify(str(cache))[1]
    after = state(cache)
    assert before["validation.tfrecord-00000"] != after["validation.tfrecord-00000"]  # one piece


def test_changes_that_are_not_extensions_are_rejected(build, tmp_path, growing, checksums):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder))
    expected = checksums(cache)
    add("a.jsonl")
    for more, message in (
        (["--row_tokens=100"], "row_tokens: 100, there: 568; 1 added"),
        (["--separator=eos"], "separator"),
    ):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "cache", flag(folder), "--extend", *more)
    (folder / "b.jsonl").write_text('{"text": "x"}')
    with pytest.raises(UserError, match=r"1 changed: b.jsonl; 1 added: a.jsonl\): restore"):
        build(tmp_path / "cache", flag(folder), "--extend")
    assert checksums(cache) == expected


def test_the_validation_share_cannot_change(build, tmp_path, growing, checksums):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder))
    expected = checksums(cache)
    add("validation.jsonl")
    with pytest.raises(UserError, match="would move between train and validation"):
        build(tmp_path / "cache", flag(folder), "--extend")
    (folder / "validation.jsonl").rename(folder / "a.jsonl")
    with pytest.raises(UserError, match=r"validation: 0\.2, there: 0\.1"):
        build(tmp_path / "cache", flag(folder, validation=0.2), "--extend")
    assert checksums(cache) == expected


def test_an_extension_may_add_a_split(build, tmp_path, growing):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder, validation=0))
    before = state(cache)
    add("validation.jsonl")
    build(tmp_path / "cache", flag(folder, validation=0), "--extend")
    assert before.items() <= state(cache).items()
    assert CacheManifest.load(str(cache)).plan.shards.keys() == {"train", "validation"}
    assert not verify(str(cache))[1]


def test_a_file_of_another_split_changes_no_plan(build, tmp_path, growing, capsys):
    folder, add = growing
    cache = build(tmp_path / "cache", flag(folder))
    add("test.jsonl")
    capsys.readouterr()
    build(tmp_path / "cache", flag(folder))
    printed = capsys.readouterr().out
    assert "nothing to do" in printed
    assert "of the split test; ?split=test" in printed
    (cache / "plan.json").write_text("{")
    (cache / "manifest.json").unlink()
    build(tmp_path / "cache", flag(folder))  # is still the same plan
    add("c.jsonl")
    build(tmp_path / "cache", flag(folder), "--extend")
    record = json.loads((cache / "plan.json").read_text())["corpus"]
    assert list(record["left_out"]) == ["test"]
    assert record["left_out"]["test"]["files"] == 1


def test_changed_files_are_named(build, tmp_path, growing):
    folder, add = growing
    names = [f"{n}.jsonl" for n in range(5)]
    for name in names:
        add(name)
    build(tmp_path / "cache", flag(folder))
    for name in names[1:]:
        add(name, copies=2)
    (folder / "0.jsonl").unlink()
    (folder / "b.jsonl").unlink()
    message = (
        r"4 changed: 1.jsonl, 2.jsonl, 3.jsonl, …; 2 missing: 0.jsonl, b.jsonl\): restore the "
        "files that have changed or are missing, or choose another --cache_dir$"
    )
    for more in ([], ["--extend"]):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "cache", flag(folder), *more)
    with pytest.raises(UserError, match=r"corpus.spec: .*; 4 changed.* use the flags"):
        build(tmp_path / "cache", flag(folder, validation=0.2))


def test_another_revision_of_the_hub_is_named(build, tmp_path, growing):
    folder, _ = growing
    plan = CacheManifest.load(str(build(tmp_path / "cache", flag(folder)))).plan

    def of_revision(revision):
        files = [{"name": "a.jsonl", "split": "train", "bytes": 5, "etag": revision}]
        spec = f"hf:owner/name@{revision}?split=train"
        corpus = {**plan.corpus, "spec": spec, "revision": revision, "files": files}
        return dataclasses.replace(plan, corpus=corpus)

    new = str(tmp_path / "new")
    files.make_folder(new)
    held = of_revision("1" * 40)
    files.write_json(files.join(new, "plan.json"), as_json(held))
    files.write_bytes(files.join(new, f".plan-{held.fingerprint}"), b"")
    for extend in (False, True):
        with pytest.raises(UserError, match=r"1 changed: .* --corpus=hf:owner/name@1{40}\?"):
            lifecycle.check(new, of_revision("2" * 40), extend)
