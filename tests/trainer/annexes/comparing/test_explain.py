"""Tests that explain shows the rows that a run trained on, and the text of the corpus."""

import json
import re
import shutil

import numpy as np
import pytest

from tasks import vocabulary
from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.runs import TASK, flags_of
from tests.trainer.conftest import built, command, ended
from tests.trainer.data.test_packing import RESUMED
from tests.trainer.data.test_packing import caches as caches
from trainer.annexes.comparing import explain
from trainer.annexes.comparing.document_steps import Sightings
from trainer.annexes.comparing.explanation import Explanation
from trainer.config import save_config
from trainer.config.from_flags import build_config
from trainer.setup import prepare

EOS_ID = vocabulary.EOS_ID


@pytest.fixture(scope="module", params=["concat", "best_fit"])
def long_cache(request, text_cache, tmp_path_factory):
    """Returns a folder with a cache of short documents and one much longer than a window."""
    folder = tmp_path_factory.mktemp("explain")
    lines = (text_cache.parents[1] / "train.txt").read_text().splitlines()
    documents = [*lines[:900], " ".join(lines[900:1400]), *lines[1400:1600]]
    (folder / "train.txt").write_text("\n".join(documents))
    built(
        *(f"--task={TASK}", f"--corpus=text:{folder}/*.txt?validation=0.1"),
        *(f"--vocabulary={text_cache.parents[1]}/vocabulary", f"--cache_dir={folder}/cache"),
        *(f"--packing={request.param}", "--row_tokens=70", "--separator=eos"),
    )
    return folder


def start(model_dir, cache_dir, *flags, preset="t5_1_1_tiny"):
    """Prepares a run, writes its config.json and returns the run."""
    given = flags_of(cache_dir, model_dir, "--train_steps=500", "--batch_size=6", *flags)
    config, origins = build_config(preset, given)
    run = prepare(config, origins)
    model_dir.mkdir()
    save_config(run.config, origins)
    return run


def record(model_dir, run):
    """Writes what a checkpoint of the fifth update records of its caches."""
    path = model_dir / "checkpoint_5" / "run" / "metadata"
    path.parent.mkdir(parents=True)
    config = json.loads((model_dir / "config.json").read_text())["config"]
    known = {"config": config, "cache_fingerprints": run.data.fingerprints, "checksums": {}}
    path.write_text(json.dumps(seal.sealed(known)))


def test_the_shown_text_is_that_of_the_corpus(long_cache, tmp_path):
    run = start(tmp_path / "model", long_cache / "cache")
    loaded = vocabulary.from_bytes(run.data.tasks[0].ids.model)
    corpus = (long_cache / "train.txt").read_bytes()
    several = inside = 0
    for step in (1, 2, 77, 500):
        explanation = Explanation(str(tmp_path / "model"), step)
        for row in range(len(explanation)):
            sample = explanation.sample(row)
            for part in sample.parts:
                # The id names the file and the byte at which the document's line begins.
                file, _, byte = part.id.rpartition(":")
                assert part.file == file == "train.txt"
                line = corpus[int(byte) :].partition(b"\n")[0].decode()
                ids = [*loaded.processor.encode(line), EOS_ID]
                # In best_fit, a full row of one piece does not record whether the document goes on.
                assert part.whole in (len(ids), None if part.tokens == 70 else len(ids))
                ids = ids[part.first : part.first + part.tokens]
                here = sample.tokens[part.position : part.position + part.tokens]
                assert here.tolist() == ids
                text = sample.text(part, explanation.ids)
                assert text.lstrip() == loaded.processor.decode(ids).lstrip()
                # Equal in every character except those unknown to the vocabulary.
                known = map(re.escape, re.split(r" *\u2047 *", text.strip()))
                assert re.search(" ?.+? ?".join(known), " ".join(line.split()))
            several += len(sample.parts) > 1
            inside += len(sample.parts) == 1 and part.first > 0
    assert several > 2, "no window across documents"
    assert inside > 2, "no window inside the long document"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--seed=5"],
        ["--task=python_docs_span_corruption=0.7,python_docs_prefix_lm=0.3",
         "--lengths.targets=96"],
        ["lm_tiny", "--task=python_docs_decoder_prefix_lm", "--lengths.inputs=0",
         "--lengths.targets=64"],
        ["bert_tiny", "--task=python_docs_masked_lm", "--lengths.targets=64"],
    ],
    ids=["one task", "another seed", "mixture", "decoder-only", "encoder-only"],
)  # fmt: skip
def test_explained_rows_are_the_rows_of_training_batches(text_cache, tmp_path, flags):
    preset, given = "t5_1_1_tiny", flags
    if flags and not flags[0].startswith("--"):
        preset, *given = flags
    run = start(tmp_path / "model", text_cache, *given, preset=preset)
    # After `first` updates, the next batches are those of updates first + 1, first + 2, …
    first = 300
    batches = run.data.training(first)
    tasks, epochs = set(), set()
    for step in range(first + 1, first + 4):
        batch = next(batches)
        explanation = Explanation(str(tmp_path / "model"), step)
        targets = next(name for name in batch if name.endswith("_target_tokens"))
        assert len(explanation) == len(batch[targets]) == 6
        for row in range(6):
            sample = explanation.sample(row)
            for side, name in (
                (sample.trace.inputs, "encoder_input_tokens"),
                (sample.trace.targets, targets),
            ):
                assert (side is None) == (name not in batch)
                if side is None:
                    continue
                expected = batch[name][row]
                assert np.array_equal(side.tokens_L, expected[: len(side.tokens_L)])
                assert not expected[len(side.tokens_L) :].any()
            tasks.add(explanation.row(row).task)
            epochs.add(explanation.row(row).epoch)
    assert len(tasks) == 1 + any("0.7," in flag for flag in flags)
    assert max(epochs) > 0


@pytest.mark.processes
def test_the_command_explains_a_run_without_checkpoints(text_cache, tmp_path, capsys):
    start(tmp_path / "model", text_cache)
    capsys.readouterr()
    flags = ("trainer.annexes.comparing.explain", f"--model_dir={tmp_path / 'model'}", "--step=41")
    explain.main([*flags[1:]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"row {row}" for row in range(6)]
    assert all("train.txt:" in line for line in lines)
    one = command(*flags, "--row=3", env={"COLUMNS": "80", "PATH": ""})
    assert one.returncode == 0, one.stderr
    assert "Step 41, row 3" in one.stdout
    assert "<extra_id_0>" in one.stdout
    for name, first, end in re.findall(r"(train.txt:\d+) \[(\d+):(\d+)\]", lines[3]):
        tokens = rf"(all {end} tokens|tokens {first} to {end} of \d+)"
        assert re.search(rf"{name} · {tokens}", one.stdout)
    page = tmp_path / "page.html"
    explain.main([*flags[1:], f"--output={page}"])
    assert capsys.readouterr().out == f"{page}: 6 rows\n"
    assert page.read_text().count("<article") == 6


@pytest.mark.parametrize("case", RESUMED)
def test_rows_of_pairs_packed_and_masked_are_explained(caches, tmp_path, capsys, case):
    preset, task, (inputs, targets), flags = RESUMED[case]
    given = (f"--task={task}", f"--lengths.inputs={inputs}", f"--lengths.targets={targets}", *flags)
    start(tmp_path / "model", caches, *given, preset=preset)
    capsys.readouterr()
    flags = [f"--model_dir={tmp_path}/model", "--step=2"]
    explain.main(flags)
    shown = capsys.readouterr().out
    assert {re.match(r"row (\d+)", line)[1] for line in shown.splitlines()} == {*"012345"}
    explain.main([*flags, "--row=1"])
    says = r"(?s)2, row 1, example 2.+UL2, mode" if case == "packed" else r"\[0:"
    assert re.search(says, shown + capsys.readouterr().out)


@pytest.mark.processes
def test_no_checkpoint_is_read_and_no_device_is_used(text_cache, tmp_path):
    start(tmp_path / "model", text_cache)
    code = (
        "import sys\n"
        "sys.modules['orbax'] = sys.modules['orbax.checkpoint'] = None\n"
        "sys.modules['sentencepiece'] = sys.modules['tensorflow'] = None\n"
        "from trainer.annexes.comparing import explain\n"
        f"explain.main(['--model_dir={tmp_path / 'model'}', '--step=1', '--row=0'])\n"
        "print('backends', 'jax' in sys.modules and sys.modules['jax']._src.xla_bridge._backends)"
    )
    result = started("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] in ("backends {}", "backends False")


def test_a_moved_cache_can_be_given(text_cache, tmp_path):
    copy = shutil.copytree(text_cache, tmp_path / "cache" / TASK)
    start(tmp_path / "model", copy.parent)
    before = Explanation(str(tmp_path / "model"), 9).line(0)
    moved = shutil.move(copy.parent, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no cache"):
        Explanation(str(tmp_path / "model"), 9)
    assert Explanation(str(tmp_path / "model"), 9, str(moved)).line(0) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=0"], "--step=0: .* steps 1 to 500"),
        (["--step=501"], "--step=501: .* steps 1 to 500"),
        (["--step=5", "--row=6"], "--row=6: the batch has rows 0 to 5"),
        (["--step=5", "--row=-1"], "--row=-1"),
        (["--step=5", "--cache_dir=/nowhere"], "no cache"),
        (["--step=5", "--model_dir=/nowhere"], "/nowhere holds no run"),
    ],
)
def test_mistakes_are_named(text_cache, tmp_path, flags, message):
    start(tmp_path / "model", text_cache)
    with pytest.raises(UserError, match=message):
        explain.main([f"--model_dir={tmp_path / 'model'}", *flags])


def test_a_run_that_trains_longer_keeps_the_batches_of_its_earlier_steps(text_cache, tmp_path):
    start(tmp_path / "model", text_cache)
    path = tmp_path / "model" / "config.json"
    value = json.loads(path.read_text())
    before = Explanation(str(tmp_path / "model"), 400).line(2)
    value["config"]["train_steps"] = 900
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="was damaged or edited, since it does not match its sha"):
        Explanation(str(tmp_path / "model"), 400)
    del value["sha256"]
    path.write_text(json.dumps(value))
    assert Explanation(str(tmp_path / "model"), 400).line(2) == before
    assert len(Explanation(str(tmp_path / "model"), 900)) == 6


def seen_by_explaining(model_dir, steps, document):
    """Returns (step, row) of every row that shows the document, by explaining every batch."""
    return [
        (step, row)
        for step in range(1, steps + 1)
        for explanation in [Explanation(str(model_dir), step)]
        for row in range(len(explanation))
        if any(part.id == document for part in explanation.row(row).parts)
    ]


@pytest.mark.processes
def test_a_document_is_found_before_and_after_its_takedown(long_cache, tmp_path, capsys):
    cache_dir = tmp_path / "cache"
    shutil.copytree(long_cache / "cache", cache_dir)
    run = start(tmp_path / "model", cache_dir)
    steps = 12
    line = json.dumps({"step": steps, "split": "train", "metrics": {}})
    (tmp_path / "model" / "metrics.jsonl").write_text(line + "\n")
    record(tmp_path / "model", run)
    first = Explanation(str(tmp_path / "model"), 3).row(2).parts
    documents = [first[0].id, first[-1].id]
    long = "train.txt:" + str(
        len("\n".join((long_cache / "train.txt").read_text().split("\n")[:900]).encode()) + 1
    )
    documents += [long, "no such document"]
    wanted = {name: seen_by_explaining(tmp_path / "model", steps, name) for name in documents}
    assert len(wanted[first[0].id]) >= 1
    assert not wanted["no such document"]

    def found():
        rows = list(Sightings(str(tmp_path / "model")).of(documents))
        return {
            name: [(each.step, each.row) for each in rows if each.document == name]
            for name in documents
        }

    assert found() == wanted
    (tmp_path / "ids.txt").write_text(first[0].id)
    packing = run.data.tasks[0].manifest.plan.packing
    again = [
        *(f"--task={TASK}", f"--packing={packing}", "--row_tokens=70"),
        *(f"--corpus=text:{long_cache}/*.txt?validation=0.1", "--separator=eos"),
        *(f"--vocabulary={run.config.cache_dir}/{TASK}", f"--cache_dir={cache_dir}"),
    ]
    built(*again, f"--exclude={tmp_path}/ids.txt")
    assert found() == wanted
    with pytest.raises(UserError, match=r"has changed since .* use --document"):
        Explanation(str(tmp_path / "model"), 3)
    (tmp_path / "wanted.txt").write_text("\n".join(documents))
    capsys.readouterr()
    explain.main([f"--model_dir={tmp_path}/model", f"--document=@{tmp_path}/wanted.txt"])
    shown = capsys.readouterr().out
    seen = {name for name in documents if wanted[name]}
    assert f"model saw {len(seen)} of {len(set(documents))} documents in " in shown
    others = ", ".join(dict.fromkeys(name for name in documents if not wanted[name]))
    assert f"model did not see {others} in any of its {steps} steps\n" in shown
    explain.main([f"--model_dir={tmp_path}/model", f"--document={long}"])
    shown = capsys.readouterr().out
    count = len({step for step, _ in wanted[long]})
    last = f"model saw {long} in {count} of its {steps} steps\n"
    assert shown.endswith(last if count else f"did not see {long} in any of its 12 steps\n")


def test_a_run_that_followed_an_unfinished_build_is_explained_after_a_takedown(
    text_cache, tmp_path
):
    folder, cache = text_cache.parents[1], tmp_path / "cache" / TASK
    again = [
        *(f"--task={TASK}", "--row_tokens=70", "--shard_bytes=20000"),
        *(f"--corpus=text:{folder}/train.txt?validation=0.1", f"--vocabulary={folder}/vocabulary"),
        f"--cache_dir={tmp_path}/cache",
    ]
    built(*again)
    for path in (cache / "COMPLETED", cache / "manifest.json", *cache.glob("*.receipt-00002-*")):
        path.unlink()
    run = start(tmp_path / "model", cache.parent, "--data.follow=true", "--data.follow_shards=1")
    record(tmp_path / "model", run)
    document = Explanation(str(tmp_path / "model"), 3).row(2).parts[0].id

    def found():
        return list(Sightings(str(tmp_path / "model")).of([document]))

    before = found()
    assert any((each.step, each.row) == (3, 2) for each in before)
    (tmp_path / "ids.txt").write_text(document)
    built(*again, f"--exclude={tmp_path}/ids.txt")
    assert found() == before


def test_step_or_document_is_needed(tmp_path, capsys):
    for flags in ([], ["--step=1", "--document=a"], ["--document=a", "--row=1"]):
        code, errors = ended(
            "trainer.annexes.comparing.explain", [f"--model_dir={tmp_path}", *flags], capsys
        )
        assert code == 2
        assert "give --step or --document" in errors or "has no effect with --document" in errors
    (tmp_path / "ids.txt").write_text("\n \n")
    for given in ("", f"@{tmp_path}/ids.txt"):
        flags = [f"--model_dir={tmp_path}", f"--document={given}"]
        code, errors = ended("trainer.annexes.comparing.explain", flags, capsys)
        assert (code, "names no document: give an id" in errors) == (2, True)
