"""Runs on adopted caches equal runs on our caches of the same rows, bit by bit."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from pipeline.adopt import main
from tasks.cache.cache import Cache
from tasks.cache.pair_windows import row_windows
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAIR_BORDER
from tests.support import foreign_caches
from tests.trainer.conftest import ROOT, built, command, training_metrics
from trainer.config.fields import override
from trainer.config.from_flags import build_config, given
from trainer.setup import prepare

SPANS, PAIRS = "python_docs_span_corruption", "qa_supervised"
SPLITS = ("train", "validation")


def rows_of(folder, split):
    """Returns the rows of a cache of ours."""
    cache = Cache.open(str(folder))
    windows = row_windows(cache.folder, cache.manifest, split, keep_tails=True)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    return [tokens_N[:n].tolist() for tokens_N, n in zip(tokens_WN, lengths_W, strict=True)]


def adopt(folder, vocabulary):
    main([f"--cache_dir={folder}", f"--vocabulary={vocabulary}"])


@pytest.fixture(scope="module")
def folders(text_cache, tmp_path_factory):
    """Folders of two caches, of texts and of pairs: ours, and adopted ones of the same tokens."""
    folder, vocabulary = tmp_path_factory.mktemp("adopted"), text_cache.parents[1] / "vocabulary"
    words = (text_cache.parents[1] / "train.txt").read_text().split()
    generator = random.Random(0)
    with (folder / "a.jsonl").open("w") as file:
        for number in range(300):
            begin = generator.randrange(len(words) - 60)
            row = {"id": f"p{number}", "q": " ".join(words[begin : begin + 1 + number % 17]),
                   "a": " ".join(words[begin + 20 : begin + 21 + number % 5])}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    built(
        "--task=supervised", "--name=qa", f"--vocabulary={vocabulary}",
        f"--corpus=json:{folder}/a.jsonl?inputs=q&targets=a&validation=0.1",
        f"--cache_dir={folder}/ours",
    )  # fmt: skip
    (folder / "ours" / SPANS).symlink_to(text_cache)

    texts, pairs = {}, {}
    for split in SPLITS:
        # Documents of other lengths than our rows, but the same stream of tokens.
        stream = np.concatenate(rows_of(text_cache, split))
        ends = sorted({*(generator.randrange(len(stream)) for _ in range(400)), len(stream)})
        texts[split] = [
            foreign_caches.pair([], stream[begin:end])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        pairs[split] = []
        for row in rows_of(folder / "ours" / PAIRS, split):
            border = row.index(PAIR_BORDER)
            sides = [*row[:border], EOS_ID], [*row[border + 1 :], EOS_ID]
            pairs[split].append(foreign_caches.pair(*sides))
    for name, rows in ((SPANS, texts), (PAIRS, pairs)):
        adopt(foreign_caches.write_seqio(folder / "theirs" / name, rows, 3), vocabulary)
    return folder


def flags_of(folder, task, preset="t5_1_1_tiny"):
    return [
        f"--preset={preset}", f"--task={task}", f"--cache_dir={folder}", "--batch_size=8",
        *(["--lengths.inputs=64", "--lengths.targets=40"] if task == PAIRS else []),
        *(["--objective=too_long=cut"] if task == PAIRS else []),
    ]  # fmt: skip


def data_of(folder, task, *more, preset="t5_1_1_tiny"):
    preset, *flags = flags_of(folder, task, preset)
    config, origins = build_config(preset.partition("=")[2], [])
    flags = [*flags, "--model_dir=nowhere", *more]
    return prepare(override(config, origins, given(flags)), origins).data


@pytest.mark.parametrize(
    ("task", "more"),
    [
        (SPANS, ()),
        (SPANS, ("--data.shuffle=block", "--data.block_bytes=1000000")),
        (PAIRS, ()),
        (PAIRS, ("--data.pack_examples=true",)),
        (f"{SPANS}=0.5,{PAIRS}=0.5", ("--lengths.inputs=256", "--lengths.targets=64")),
    ],
    ids=str,
)
def test_batches_equal_ours_on_any_number_of_hosts(folders, task, more):
    ours, theirs = (data_of(folders / name, task, *more) for name in ("ours", "theirs"))
    steps = (0, 1, 17, 10**6)
    batches = theirs.batches()
    # Blocks, and windows that begin anew in each shard, follow the shards, which differ.
    for step in steps if not more or PAIRS in task else ():
        wanted = ours.batches()[step]
        for name, array in batches[step].items():
            np.testing.assert_array_equal(array, wanted[name], err_msg=f"{step} {name}")
    for hosts in (2, 4):
        parts = [theirs.batches(host, hosts) for host in range(hosts)]
        for step in steps:
            for name, array in batches[step].items():
                joined = np.concatenate([part[step][name] for part in parts])
                np.testing.assert_array_equal(joined, array)
    found, wanted = (data.evaluation("validation", 8) for data in (theirs, ours))
    for one, other in zip(found, wanted, strict=True):
        if "order" in str(more):
            continue
        for batch, same in zip(one.iterate(), other.iterate(), strict=True):
            for name, array in batch.items():
                np.testing.assert_array_equal(array, same[name])


def test_the_start_says_what_is_read(folders):
    lines = dict(data_of(folders / "theirs", PAIRS).consequences())
    assert "pairs" in lines["cache"]
    assert lines["cache"].startswith(f"{folders}/theirs/{PAIRS}: ")
    lines = dict(data_of(folders / "theirs", SPANS).consequences())
    assert lines["cache"].endswith(", concat")


def test_a_vocabulary_that_is_not_known(tmp_path):
    rows = {"train": [{"targets": [5, 9, 700]}] * 99}
    main([f"--cache_dir={foreign_caches.write_seqio(tmp_path / 'web_lm', rows)}"])
    data = data_of(tmp_path, "web_lm", "--lengths.targets=16", preset="lm_tiny")
    assert data.batches()[0]["decoder_target_tokens"].max() == 700
    with pytest.raises(UserError, match=r"vocabulary of .*web_lm is not known, as it was adopted"):
        data.encode("text")
    with pytest.raises(UserError, match=r"and the vocabulary of .*web_lm has 0"):
        data_of(tmp_path / "web_lm", "span_corruption")


def killed(flags, model, after):
    """Starts a run and kills it once it has written the metrics of a step."""
    metrics = model / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        while process.poll() is None:
            if metrics.exists() and f'"step": {after},' in metrics.read_text():
                break
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0].decode()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("task", [PAIRS, SPANS])
def test_losses_equal_ours_after_a_kill(folders, tmp_path, task):
    def flags(name):
        return [
            "trainer.pretrain", *flags_of(folders / name, task), f"--model_dir={tmp_path}/{name}",
            "--train_steps=14", "--checkpoint.every_steps=4", "--metrics.every_steps=1",
            "--evaluation.every_steps=7",
        ]  # fmt: skip

    made = command(*flags("ours"))
    assert made.returncode == 0, made.stderr
    killed(flags("theirs"), tmp_path / "theirs", 6)
    made = command(*flags("theirs"))
    assert made.returncode == 0, made.stderr
    assert "resum" in made.stdout + made.stderr
    ours = training_metrics(tmp_path / "ours")
    assert list(ours) == list(range(1, 15))
    assert training_metrics(tmp_path / "theirs") == ours
    shown = command("trainer.explain", f"--model_dir={tmp_path}/theirs", "--step=2")
    assert f"{task}, epoch 0" in shown.stdout, shown.stderr
    assert "train.tfrecord-0000" in shown.stdout
