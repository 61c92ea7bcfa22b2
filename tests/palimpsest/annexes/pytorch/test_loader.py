"""Batches in PyTorch: the same for any workers, ranks and resumes; masks for attention."""

import importlib
import itertools
import os
import random
import shutil
import signal
import sys

import numpy as np
import pytest

import palimpsest
from palimpsest.annexes.pytorch import tensors
from tasks.terminal.command_line import UserError
from tests.support.processes import launched
from tests.support.runs import TASK
from tests.support.trees import assert_equal

pytestmark = pytest.mark.torch

PREFIX, LM, MASKED = (
    f"python_docs_{name}" for name in ("prefix_lm", "autoregressive_lm", "masked_lm")
)
PACKED = {"pack_examples": True, "example_inputs": 20, "example_targets": 20}


def batches(cache, task=TASK, inputs=64, targets=64, **flags):
    lengths = {"inputs": inputs, "targets": targets}
    return palimpsest.batches(task, cache_dir=cache, batch_size=4, lengths=lengths, **flags)


def loader(found, **options):
    return palimpsest.torch.DataLoader(found, **options)


def test_it_is_imported_by_its_short_name():
    from palimpsest.torch import DataLoader

    assert DataLoader is palimpsest.torch.DataLoader
    for name in ("batches", "none"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named 'palimpsest.{name}'"):
            importlib.import_module(f"palimpsest.{name}")


def arrays(batch):
    return {name: tensor.numpy() for name, tensor in batch.items()}


@pytest.fixture(scope="module")
def mixture(text_cache):
    """A mixture of packed spans and a prefix LM, of 60 batches."""
    return batches(text_cache, f"{TASK}=0.7,{PREFIX}=0.3", data=PACKED, train_steps=60)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # fewer cores than workers
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_give_the_trainers_batches(mixture, workers):
    found = loader(mixture, form="features", workers=workers)
    assert len(found) == 60
    assert_equal([arrays(batch) for batch in itertools.islice(found, 12)], mixture[:12])
    assert found.state == 12
    assert_equal(arrays(next(iter(found))), mixture[12])


def test_other_ranks_and_workers_go_on(mixture):
    draw = random.Random(0)
    state, ranks, k = None, 1, 0
    while k < 50:
        loaders = [
            loader(
                mixture, form="features", rank=rank, world_size=ranks, workers=draw.choice([0, 1])
            )
            for rank in range(ranks)
        ]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        count = draw.randrange(1, 12)
        taken = [[arrays(batch) for batch in itertools.islice(each, count)] for each in loaders]
        for number, parts in enumerate(zip(*taken, strict=True)):
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            assert_equal(whole, mixture[k + number])
        k, ranks = k + count, draw.choice([1, 2, 4])
        state = loaders[-1].state_dict()
        assert state["state"] == k


def test_a_state_of_other_batches_is_refused(text_cache, mixture):
    state = loader(batches(text_cache, seed=1)).state_dict()
    with pytest.raises(UserError, match=r"the state is of other batches: .*seed was 1, is 0"):
        loader(batches(text_cache)).load_state_dict(state)
    state = loader(batches(text_cache)).state_dict()
    state["config"]["caches"][TASK] = "other"
    with pytest.raises(UserError, match="the caches have other plans"):
        loader(batches(text_cache)).load_state_dict(state)
    later = loader(batches(text_cache, batch_schedule="9: 8"))
    state = loader(batches(text_cache)).state_dict() | {"state": 9}
    later.load_state_dict(state)  # what comes later may change
    assert len(next(iter(later))["input_ids"]) == 8
    with pytest.raises(UserError, match="batch_schedule was '', is '9: 8'"):
        later.load_state_dict(state | {"state": 10})


def test_a_held_out_split_is_read_again(text_cache):
    found = loader(batches(text_cache, split="validation"), form="features")
    for _ in range(2):
        assert_equal(arrays(next(iter(found))), batches(text_cache, split="validation")[0])
    assert sum(1 for _ in found) == len(found) > 1


def test_the_state_of_a_split(text_cache):
    held_out = loader(batches(text_cache, split="validation"))
    held_out.load_state_dict(held_out.state_dict())
    with pytest.raises(UserError, match="split was validation, is None"):
        loader(batches(text_cache)).load_state_dict(held_out.state_dict())


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_is_one_line_from_a_worker(text_cache, tmp_path, workers):
    shutil.copytree(text_cache, tmp_path / TASK)
    found = loader(batches(tmp_path), workers=workers)
    shutil.rmtree(tmp_path / TASK)
    with pytest.raises(UserError, match=r"^\S+ is missing: run pipeline\.build again$"):
        next(iter(found))
    assert found.state == 0


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ctrl_c_ends_all_workers(text_cache, method):
    code = (
        "import palimpsest, sys, torch\n"
        "if __name__ == '__main__':\n"
        f"    torch.multiprocessing.set_start_method({method!r})\n"
        f"    found = palimpsest.batches({TASK!r}, cache_dir={str(text_cache)!r}, batch_size=4,\n"
        "        lengths={'inputs': 64, 'targets': 18})\n"
        "    found.state = 1_000_000\n"
        "    first, other = (iter(palimpsest.torch.DataLoader(found, workers=1)) for _ in '12')\n"
        "    same = next(first)['labels'].equal(next(other)['labels'])\n"
        "    print(same, flush=True)\n"
        "    for batch in first: pass\n"
    )
    process = launched([sys.executable, "-c", code])
    assert process.stdout.readline().strip() == "True"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    "state", [None, {}, {"state": 3}, {"state": 3, "config": None}, {"state": "x"}, [3]]
)
def test_what_is_no_state_is_refused(mixture, state):
    with pytest.raises(UserError, match="the state is not what"):
        loader(mixture).load_state_dict(state)


def test_mistakes_are_one_line(mixture):
    with pytest.raises(UserError, match=r"batches is 3: it must be palimpsest\.batches"):
        loader(3)
    with pytest.raises(UserError, match="form=3: it is one of"):
        loader(mixture, form=3)
    for name, wrong in itertools.product(("workers", "prefetch", "rank"), (1.5, "1")):
        options = {"world_size": 2} if name == "rank" else {}
        with pytest.raises(UserError, match=r" is .*: it must be a whole number"):
            loader(mixture, **{name: wrong}, **options)
    for options in ({"workers": -1}, {"prefetch": 0}):
        with pytest.raises(UserError, match="workers must be 0 or more, and prefetch 1 or more"):
            loader(mixture, **options)
    with pytest.raises(UserError, match=r"form=flot \(did you mean flat\?\): it is one of"):
        loader(mixture, form="flot")
    with pytest.raises(UserError, match="give both rank and world_size, or neither"):
        loader(mixture, rank=0)
    with pytest.raises(UserError, match="batch_size 4 is not divisible by the 3 hosts"):
        loader(mixture, rank=0, world_size=3)
    with pytest.raises(UserError, match="form=flat is for a decoder"):
        next(iter(loader(mixture, form="flat")))


def test_its_attributes_are_a_dataloaders(mixture):
    found = loader(mixture)
    assert (found.num_workers, found.pin_memory) == (0, False)
    assert [*itertools.islice(found.batch_sampler, 2)] == [[0], [1]]
    assert len(found.batch_sampler) == 60
    assert not hasattr(found, "set_epoch")
    assert found.explain(0, 3) == mixture.explain(0, 3)


def seen(mask):
    """Returns which keys queries see, of an additive mask [B, 1, Q, K]."""
    return mask[:, 0] == 0


def test_masks_of_packed_rows_are_blocks(text_cache):
    found = batches(text_cache, PREFIX, data=PACKED)
    raw, made = found[0], tensors.for_transformers(found[0])
    inputs, targets = raw["encoder_segment_ids"], raw["decoder_segment_ids"]
    assert inputs.max() > 1
    for mask, queries, keys in (
        ("attention_mask", inputs, inputs),
        ("cross_attention_mask", targets, inputs),
    ):
        for row in range(4):
            wanted = np.equal.outer(queries[row], keys[row])
            np.testing.assert_array_equal(seen(made[mask])[row], wanted)
    for row, query in itertools.product(range(4), range(targets.shape[1])):
        keys = np.flatnonzero(seen(made["decoder_attention_mask"])[row, query])
        same = np.flatnonzero(targets[row] == targets[row, query])
        assert keys.tolist() == [each for each in same.tolist() if each <= query]
    assert (made["labels"] == -100).sum() == (raw["decoder_loss_weights"] == 0).sum()


def test_a_decoders_labels(text_cache):
    found = batches(text_cache, LM, inputs=0, preset="lm_small")
    raw, made = found[0], tensors.for_transformers(found[0])
    np.testing.assert_array_equal(made["input_ids"], raw["decoder_input_tokens"])
    np.testing.assert_array_equal(made["labels"][:, 1:], made["shift_labels"][:, :-1])
    np.testing.assert_array_equal(made["shift_labels"], raw["decoder_target_tokens"])
    assert (made["labels"][:, 0] == -100).all()


def test_segments_of_a_decoder_as_one_row(text_cache):
    found = batches(text_cache, LM, inputs=0, preset="lm_small", data={"segment_documents": True})
    raw, made = found[0], tensors.flat(found[0])
    tokens = int((raw["decoder_segment_ids"] > 0).sum())
    assert made["input_ids"].shape == made["labels"].shape == (1, tokens)
    ends = made["cu_seq_lens_q"]
    assert ends[0] == 0
    assert ends[-1] == tokens
    assert len(ends) - 1 == sum(len(np.unique(row[row > 0])) for row in raw["decoder_segment_ids"])
    assert made["max_length_k"] == np.diff(ends).max()
    assert (made["position_ids"][0, ends[:-1]] == 0).all()


def test_an_encoders_arguments(text_cache):
    found = batches(text_cache, MASKED)
    raw, made = found[0], tensors.for_transformers(found[0])
    is_loss = raw["encoder_loss_weights"] > 0
    np.testing.assert_array_equal(made["labels"][is_loss], raw["encoder_target_tokens"][is_loss])
    assert (made["labels"][~is_loss] == -100).all()
    assert {"input_ids", "attention_mask", "token_type_ids", "next_sentence_label"} < made.keys()
