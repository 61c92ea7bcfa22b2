"""palimpsest inspect shows windows with their documents and the examples made from them."""

import json
import shutil
import sys

import pytest

from tasks import registry, vocabulary
from tasks.annexes.inspecting import inspect
from tasks.cache.cache import Cache
from tasks.cache.manifest import CacheManifest, sealed
from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, VOCABULARY
from tests.support.processes import started
from trainer.config.from_flags import build_config
from trainer.setup import prepare

SPANS = registry.get("python_docs_span_corruption")


@pytest.fixture(scope="module")
def best_fit(build, tmp_path_factory):
    return build(
        tmp_path_factory.mktemp("best_fit"), "--packing=best_fit", "--row_tokens=90",
        "--separator=eos",
    )  # fmt: skip


def open_cache(folder):
    opened = Cache.open(str(folder))
    extra_ids = opened.manifest.plan.vocabulary.extra_ids
    return opened, vocabulary.load(str(folder / VOCABULARY), extra_ids)


def shown(folder, task, lengths, indices, split="train"):
    opened, _ = open_cache(folder)
    return inspect.samples(opened, split, task, lengths, indices, seed=3, epoch=1)


def assert_text_is_the_documents(samples, loaded, documents, ends):
    """Compares text; returns the number of parts that begin inside their document."""
    inside = 0
    encoded = {name: loaded.processor.encode(text) + ends for name, text in documents.items()}
    for sample in samples:
        at = 0
        for part in sample.parts:
            ids = encoded[part.id]
            assert part.position == at
            at += part.tokens
            expected = ids[part.first : part.first + part.tokens]
            assert sample.tokens[part.position : at].tolist() == expected
            text = loaded.processor.decode([token for token in expected if token != EOS_ID])
            assert sample.text(part, loaded.ids).lstrip(" ") == text.lstrip(" ")
            assert part.whole in (len(ids), None if part.tokens == 90 else len(ids))
            inside += part.first > 0
        assert at == len(sample.tokens)
    return inside


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_text_of_every_window_is_that_of_its_documents(cache, documents, split):
    _, loaded = open_cache(cache)
    for task, lengths, number in ((SPANS, Lengths(64, 30), 80), (None, Lengths(0, 0), 1 << 30)):
        samples = shown(cache, task, lengths, number, split)
        assert len(samples) > 5
        inside = assert_text_is_the_documents(samples, loaded, documents, [])
        # Windows across documents, and within one.
        assert inside > 5
        assert {len(sample.parts) > 1 for sample in samples} == {True, False}
    manifest = CacheManifest.load(str(cache))
    assert sum(len(each.tokens) for each in samples) == manifest.total(split, "tokens")


@pytest.mark.slow
def test_windows_of_best_fit_are_their_documents(best_fit, documents):
    _, loaded = open_cache(best_fit)
    samples = shown(best_fit, None, Lengths(0, 0), 1 << 30)
    assert assert_text_is_the_documents(samples, loaded, documents, [EOS_ID]) > 5
    names = [part.id for sample in samples for part in sample.parts if not part.first]
    manifest = CacheManifest.load(str(best_fit))
    assert len(names) == len({*names}) == manifest.total("train", "documents")


def test_draws_and_noise_follow_seed_and_epoch(cache):
    opened, _ = open_cache(cache)

    def made(indices, seed, epoch):
        samples = inspect.samples(opened, "train", SPANS, Lengths(64, 30), indices, seed, epoch)
        return [sample.trace.inputs.tokens_L.tolist() for sample in samples]

    assert made(3, 1, 0) == made(3, 1, 0)
    assert made(3, 1, 0) != made(3, 2, 0)
    assert made([7], 1, 0) != made([7], 1, 1)


def test_validation_shows_the_noise_of_evaluation_in_a_run(cache):
    task, seed = "python_docs_span_corruption", 11
    flags = [f"--task={task}", f"--cache_dir={cache}", f"--seed={seed}", "--model_dir=none"]
    flags += ["--lengths.inputs=64", "--lengths.targets=30", "--batch_size=4"]
    (rows,) = prepare(*build_config("t5_1_1_tiny", flags)).data.evaluation("validation", 4)
    batches = list(rows.iterate())
    opened, _ = open_cache(cache)
    samples = inspect.samples(opened, "validation", SPANS, Lengths(64, 30), 1 << 30, seed, epoch=2)
    assert len(samples) > 8
    for number, sample in enumerate(samples):
        batch, row = batches[number // 4], number % 4
        for side, feature in (
            (sample.trace.inputs, "encoder_input_tokens"),
            (sample.trace.targets, "decoder_target_tokens"),
        ):
            size = len(side.tokens_L)
            assert batch[feature][row, :size].tolist() == side.tokens_L.tolist()
            assert not batch[feature][row, size:].any()
        assert ("noise", "seed 11, evaluation") in sample.facts


def test_the_command_shows_windows(cache, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    inspect.main([f"--cache={cache}", "--index=3,1", "--inputs=64", "--targets=30"])
    out = capsys.readouterr().out
    assert out.index("Window 3") < out.index("Window 1 ")
    assert "<extra_id_0>" in out
    assert "64 of 64 positions, no padding" in out
    assert "train.tfrecord-00000-of-" in out
    assert max(map(len, out.splitlines())) <= 80
    inspect.main([f"--cache={cache}", "--task=python_docs_prefix_lm", "--windows=2"])
    assert capsys.readouterr().out.count("── Window") == 2


def test_the_command_writes_a_page(cache, tmp_path, capsys):
    page = tmp_path / "page.html"
    inspect.main([f"--cache={cache}", "--html", str(page), "--windows=4"])
    assert capsys.readouterr().out == f"{page}: 4 windows\n"
    assert page.read_text().count("<article") == 4


@pytest.mark.processes
def test_a_cache_of_an_unknown_task_shows_its_rows(cache, tmp_path, capsys):
    copy = shutil.copytree(cache, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["plan"]["task"] = "my_own"
    del manifest["sha256"]
    (copy / "manifest.json").write_text(json.dumps(sealed(manifest)))
    inspect.main([f"--cache={copy}", "--index=2"])
    out = capsys.readouterr().out
    assert "WINDOW" in out
    assert "INPUTS" not in out
    for flag in ("--epoch=1", "--inputs=9", "--targets=9"):
        with pytest.raises(UserError, match="names no known task, so its rows have no --inputs"):
            inspect.main([f"--cache={copy}", flag])
    (tmp_path / "my_tasks.py").write_text(
        "from tasks.task import pretraining_tasks\n"
        "import dataclasses\n"
        "TASKS = [dataclasses.replace(each, name='my_own') for each in\n"
        "         pretraining_tasks('my', 'python_docs') if each.name == 'my_prefix_lm']\n"
    )
    result = started(
        "-m", "palimpsest", "inspect", f"--cache={copy}", "--task_module=my_tasks", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "task: my_own" in result.stdout


WRONG = {
    "no cache": (["--cache=/nowhere"], "pipeline.build"),
    "no such window": (["--index=1,9999999"], "--index=9999999"),
    "no window": (["--index="], "--index="),
    "a window below 0": (["--index=-1"], "--index=-1"),
    "no such split": (["--split=test"], "no split test"),
    "no such task": (["--task=python_docs_span_coruption"], "python_docs_span_corruption"),
    "another separator": (["--task=python_docs_full_lm"], "--separator=eos"),
    "lengths that do not fit": (["--inputs=512", "--targets=20"], "114"),
    "no window so long": (["--inputs=400000", "--targets=400000"], "sentinels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_what_is_wrong(case, cache):
    flags, says = WRONG[case]
    given = [] if flags[0].startswith("--cache") else [f"--cache={cache}"]
    with pytest.raises(UserError, match=says):
        inspect.main([*given, *flags])


def test_a_missing_pyarrow_is_reported_with_its_extra(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    from tasks.cache import lineage

    lineage._group_ends.cache_clear()
    with pytest.raises(UserError, match=r"pip install .*\[pipeline\]"):
        shown(cache, SPANS, Lengths(64, 30), [0])


@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_a_damaged_file_is_named(cache, tmp_path, kind):
    copy = shutil.copytree(cache, tmp_path / "copy")
    for path in copy.glob(f"train.{kind}-*"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=rf"train\.{kind}-\d+"):
        shown(copy, SPANS, Lengths(64, 30), 1)
