"""Batches for other programs: the trainer's own, by index and in turn, by rank, with documents."""

import importlib.util
import itertools
import json
import os
import pickle
import shutil

import numpy as np
import pytest

import palimpsest
from tasks import annexes
from tasks.terminal.command_line import UserError
from tests.support.processes import PYTHONPATH, started
from tests.support.runs import ROOT, TASK, config_of, run_of
from tests.support.trees import assert_equal
from trainer.config import save_config

_NAMES = ("prefix_lm", "autoregressive_lm", "masked_lm")
PREFIX, LM, MASKED = (f"python_docs_{name}" for name in _NAMES)
MIXTURE = f"{TASK}=0.7,{PREFIX}=0.3"
LENGTHS = {"inputs": 64, "targets": 64}
PACKED = {
    "data": {"pack_examples": True, "example_inputs": 20, "example_targets": 20},
    "lengths": LENGTHS,
}
# Name -> task, flags as Python values, the same as words, and the preset.
CASES = {
    "spans": (TASK, {}, [], "t5_1_1_tiny"),
    "mixture": (
        MIXTURE,
        {"seed": 3, "mixing": {"schedule": f"4: {TASK}=1,{PREFIX}=9"}, "lengths": LENGTHS},
        ["--seed=3", f"--mixing.schedule=4: {TASK}=1,{PREFIX}=9", "--lengths.targets=64"],
        "t5_1_1_tiny",
    ),
    "packed": (
        PREFIX,
        PACKED,
        ["--data.pack_examples=true", "--data.example_inputs=20", "--data.example_targets=20",
         "--lengths.targets=64"],
        "t5_1_1_tiny",
    ),
    "decoder": (TASK, {"preset": "lm_tiny"}, [], "lm_tiny"),
    "schedules": (
        TASK,
        {"batch_schedule": "3: 8", "data.skip": ("2:4",),
         "length_schedule": "5: inputs=32,targets=9"},
        ["--batch_schedule=3: 8", "--data.skip=2:4", "--length_schedule=5: inputs=32,targets=9"],
        "t5_1_1_tiny",
    ),
}  # fmt: skip


def batches(cache, task=TASK, **flags):
    given = {"cache_dir": cache, "batch_size": 4, "lengths": {"inputs": 64, "targets": 18}, **flags}
    return palimpsest.batches(task, **given)


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_trainers(text_cache, case):
    task, flags, words, preset = CASES[case]
    found = batches(text_cache, task, **flags)
    run = run_of(text_cache, f"--task={task}", *words, preset=preset)
    assert_equal([*itertools.islice(run.data.training(0), 8)], found[:8])
    assert_equal(found[10**6], run.data.batches()[10**6])
    for k in (0, 3, 6):
        found.state = k
        assert {name: (array.shape, array.dtype) for name, array in found[k].items()} == found.spec


def test_indices_slices_and_turns(text_cache):
    found = batches(text_cache, train_steps=6)
    assert len(found) == 6
    assert len({batch["encoder_input_tokens"].tobytes() for batch in found}) == found.state == 6
    assert [*found] == []
    assert_equal(found[-1], found[5])
    assert_equal(found[1:6:2], [found[1], found[3], found[5]])
    assert_equal(found[-2:], [found[4], found[5]])
    for wrong in (6, -7):
        with pytest.raises(IndexError, match=f"batch {wrong}: the batches are Batches.*, 6"):
            found[wrong]
    found.state = 4
    assert_equal([*found], found[4:])
    for wrong in (7, -1):
        with pytest.raises(UserError, match=f"state={wrong}: it must be .* taken, 0 to 6"):
            found.state = wrong


def test_what_is_left_over_is_not_counted(text_cache):
    """Batches that were read ahead, but not taken, come again."""
    found = batches(text_cache, **{"data.threads": 2, "data.prefetch": 5})
    for number, _ in enumerate(found):
        if number == 2:
            break
    assert found.state == 3
    assert_equal([*itertools.islice(found, 2)], found[3:5])


def test_endless_batches_have_no_length(text_cache):
    found = batches(text_cache)
    with pytest.raises(TypeError, match="endless: give train_steps"):
        len(found)
    for wrong in (slice(None), slice(3, None), slice(-2, 5), slice(0, -1)):
        with pytest.raises(TypeError, match="end the slice, and count from 0"):
            found[wrong]
    with pytest.raises(IndexError):
        found[-1]
    assert found[5:2] == []


@pytest.mark.parametrize("case", ["mixture", "packed", "schedules"])
def test_ranks_read_parts_of_the_same_batches(text_cache, case):
    task, flags, _, _ = CASES[case]
    whole = batches(text_cache, task, **flags)
    halves = [whole.shard(index, 2) for index in range(2)]
    quarters = [half.shard(index, 2) for half in halves for index in range(2)]
    assert [each.part for each in quarters] == [(index, 4) for index in range(4)]
    for k in (0, 2, 5):
        for parts in (halves, quarters):
            assert_equal(joined([part[k] for part in parts]), whole[k])
            found = [document for part in parts for document in part.explain(k, 0)]
            rows = len(parts[0][k]["decoder_target_tokens"])
            theirs = [one for index in range(len(parts)) for one in whole.explain(k, index * rows)]
            assert found == theirs
    with pytest.raises(UserError, match="batch_size 4 is not divisible by the 3 hosts"):
        whole.shard(0, 3)
    with pytest.raises(
        UserError, match=r"shard\(2, 2\): the index must be 0 or more, below the count"
    ):
        whole.shard(2, 2)


def test_documents_of_a_row(text_cache):
    found = batches(text_cache)
    documents = found.explain(3, 1)
    windows = run_of(text_cache).data.sources[0].maker.windows
    assert sum(each.tokens for each in documents) == windows.window_tokens
    assert {(each.task, each.epoch, each.example) for each in documents} == {(TASK, 0, 0)}
    assert json.loads(json.dumps(documents)) == [[*each] for each in documents]
    assert documents != found.explain(3, 2)
    with pytest.raises(UserError, match="row 4: the batch has rows 0 to 3"):
        found.explain(3, 4)


def test_a_run_gives_its_own_batches(text_cache, tmp_path):
    run = run_of(text_cache, f"--task={MIXTURE}", "--lengths.targets=64", "--train_steps=9")
    save_config(config_of(*flags_in(run, tmp_path)), {}, run.data.record)
    found = palimpsest.batches(model_dir=tmp_path, cache_dir=text_cache)
    assert_equal(found[:9], [*itertools.islice(run.data.training(0), 9)])
    assert len(found) == 9
    with pytest.raises(UserError, match="model_dir determines seed: leave it out"):
        palimpsest.batches(model_dir=tmp_path, seed=3)
    record = json.loads(json.dumps(run.data.record))
    record["tasks"][TASK]["separator"] = "other"
    save_config(config_of(*flags_in(run, tmp_path)), {}, record)
    with pytest.raises(UserError, match=r"was trained on different examples .*separator"):
        palimpsest.batches(model_dir=tmp_path, cache_dir=text_cache)


def flags_in(run, folder):
    """Returns the flags of a run in another folder."""
    config = run.config
    lengths = [f"--lengths.{side}={getattr(config.lengths, side)}" for side in LENGTHS]
    return [
        *(f"--task={config.task}", f"--cache_dir={config.cache_dir}", f"--model_dir={folder}"),
        *(f"--batch_size={config.batch_size}", f"--train_steps={config.train_steps}", *lengths),
    ]


@pytest.mark.parametrize("case", ["spans", "mixture", "decoder"])
def test_a_split_is_what_evaluations_read(text_cache, case):
    task, flags, words, preset = CASES[case]
    found = batches(text_cache, task, split="validation", **flags)
    run = run_of(text_cache, f"--task={task}", *words, preset=preset)
    sets = run.data.evaluation("validation", 4)
    assert_equal([*found], [batch for one in sets for batch in one.iterate()])
    assert len(found) == found.state == sum(one.batches for one in sets)
    assert_equal(next(iter(found)), found[0])  # each evaluation begins again
    half = pickle.loads(pickle.dumps(found.shard(1, 2)))
    assert_equal(half[-1], {name: array[2:] for name, array in found[-1].items()})
    assert {name: (array.shape, array.dtype) for name, array in half[0].items()} == half.spec
    assert_equal(palimpsest.batches(config=found.config, cache_dir=text_cache)[2], found[2])
    assert half.explain(0, 1) == found.explain(0, 3) != found.explain(0, 2)
    rows = found[-1]["decoder_loss_weights"].any(axis=1)
    assert [bool(found.explain(len(found) - 1, row)) for row in range(4)] == rows.tolist()
    with pytest.raises(UserError, match=r"has no (text in )?split test"):
        batches(text_cache, task, split="test", **flags)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_determines_the_batches(text_cache, case):
    task, flags, _, _ = CASES[case]
    found = batches(text_cache, task, **flags)
    config = json.loads(json.dumps(found.config))
    assert str(text_cache.parent) not in json.dumps(config)
    again = palimpsest.batches(config=config, cache_dir=text_cache)
    assert again.config == found.config
    assert_equal(again[:6], found[:6])
    assert again.length is None
    config["caches"][task.partition("=")[0]] = "0" * 64
    with pytest.raises(UserError, match="is not the one of config: it has another plan"):
        palimpsest.batches(config=config, cache_dir=text_cache)


def test_another_process_opens_them_itself(text_cache, monkeypatch):
    half = batches(text_cache, MIXTURE, lengths=LENGTHS, train_steps=50).shard(1, 2)
    half.state = 7
    pickled = pickle.dumps(half)
    again = pickle.loads(pickled)
    assert (again.state, again.part, len(again)) == (7, (1, 2), 50)
    assert_equal(again[7], half[7])
    monkeypatch.setattr(type(half), "config", {"other": 1})
    with pytest.raises(UserError, match="the caches have changed since they were opened"):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("task", "feature"),
    [
        (TASK, "encoder_input_tokens"),
        (LM, "decoder_target_tokens"),
        (MASKED, "encoder_token_types"),
    ],
)
def test_the_task_names_the_kind_of_model(text_cache, task, feature):
    sides = {TASK: (64, 18), LM: (0, 64), MASKED: (2000, 2000)}[task]
    found = batches(text_cache, task, lengths=dict(zip(LENGTHS, sides, strict=True)))
    assert feature in found.spec
    assert ("encoder_input_tokens" in found.spec) is (task != LM)


def test_a_reading_process_is_small(text_cache):
    code = (
        "import sys, palimpsest\n"
        f"found = palimpsest.batches({MIXTURE!r}, cache_dir={str(text_cache)!r},\n"
        "    lengths={'inputs': 64, 'targets': 64}, batch_size=4)\n"
        "assert len(found[0]['encoder_input_tokens']) == len(next(iter(found)).popitem()[1]) == 4\n"
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line], *{\n"
        "    name.partition('.')[0] for name in sys.modules})"
    )
    kilobytes, *modules = started("-c", code).stdout.split()
    assert not {"jax", "flax", "tensorflow", "torch", "grain", "orbax", "pandas"} & {*modules}
    assert int(kilobytes) < 300_000


@pytest.mark.processes
def test_a_loop_in_flax_learns(text_cache):
    example = ROOT / "examples" / "trainers" / "flax_nnx.py"
    done = started(example, LM, text_cache, 8, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert done.returncode == 0, done.stderr
    numbers, losses = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert numbers == tuple(str(number) for number in range(1, 9))
    assert float(losses[-1]) < float(losses[0]) - 1


def example(name):
    """Returns the module of an example."""
    path = ROOT / "examples" / "trainers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_maxtext_reads_them_from_grain(text_cache):
    data = {"segment_documents": True}
    found = batches(text_cache, LM, lengths={"targets": 64}, data=data, train_steps=9)
    dataset = example("maxtext_input").dataset
    hosts = [iter(dataset(found, host, 2)) for host in range(2)]
    for k in range(3):
        made = joined([next(host) for host in hosts])
        assert_equal(made["inputs"], found[k]["decoder_input_tokens"])
        assert_equal(made["targets_segmentation"], found[k]["decoder_segment_ids"])
        assert made["inputs_segmentation"].max() > 1
    state, resumed = hosts[1].get_state(), iter(dataset(found, 1, 2))
    resumed.set_state(state)
    assert_equal(next(resumed), next(hosts[1]))
    assert sum(1 for _ in hosts[0]) == 6
    plain = example("maxtext_input").for_maxtext(
        batches(text_cache, LM, lengths={"targets": 64})[0]
    )
    assert plain["inputs_position"].tolist() == [[*range(64)]] * 4
    assert plain["inputs_segmentation"].all()


def shards_of(loader, folder, texts):
    """Writes texts as another loader's shards."""
    package = pytest.importorskip(loader, reason=f"{loader} is not installed")
    if loader == "streaming":
        with package.MDSWriter(out=str(folder), columns={"text": "str"}, size_limit=9999) as shards:
            for text in texts:
                shards.write({"text": text})
    elif loader == "litdata":
        samples = [{"text": text} for text in texts]
        package.optimize(dict, samples, str(folder), chunk_bytes="9KB", num_workers=1)
    else:
        package.Dataset.from_dict({"text": texts}).to_parquet(folder / "0.parquet")


@pytest.mark.processes
@pytest.mark.parametrize("loader", ["streaming", "litdata", "datasets"])
def test_a_cache_has_the_tokens_of_other_loaders(text_cache, tmp_path, loader):
    home = text_cache.parents[1]
    (tmp_path / "shards").mkdir()
    shards_of(loader, tmp_path / "shards", (home / "train.txt").read_text().splitlines()[:500])
    words = loader, tmp_path / "shards", home / "vocabulary" / "sentencepiece.model"
    program = ROOT / "examples" / "trainers" / "migrating.py"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HOME": str(tmp_path)}
    done = started(program, *words, tmp_path / "made", env=environment)
    assert done.returncode == 0, done.stderr
    assert f" tokens of {loader}, " in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"optimizer": {"learning_rate": 1}}, "batches: optimizer.learning_rate does not change"),
        ({"checkpoint.every_steps": 3}, "batches: checkpoint.every_steps does not change"),
        ({"print_config": "values"}, "batches: print_config does not change batches"),
        ({"batch_size": 0}, "--batch_size=0: it must be 1 or more"),
        ({"nonsense": 1}, "unknown flag --nonsense"),
        ({"data.pack": False}, "--data.pack has no effect"),
        ({"cache_dir": ""}, "--cache_dir is missing"),
        ({"config": {}}, "batches: give one of a task, model_dir and config, not 2"),
        ({"model_dir": "x"}, "batches: give one of a task, model_dir and config, not 2"),
        ({"preset": "t5"}, "unknown preset t5"),
    ],
)
def test_mistakes_are_one_line(text_cache, flags, says):
    with pytest.raises(UserError) as raised:
        batches(text_cache, **flags)
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


HUGE = 10**5000  # Python does not print it


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("seed", "x", "config: seed is 'x'; it must be a whole number"),
        ("seed", None, "config: seed is None; it must be a whole number"),
        ("seed", True, "config: seed is True; it must be a whole number"),
        pytest.param("seed", HUGE, "config: seed is a number of more than 4,300", id="huge"),
        ("batch_size", 1.5, "config: batch_size is 1.5; it must be a whole number"),
        ("batch_size", -1, "config is from a different version: batch_size is -1; it must be 1 or"),
        ("batch_size", 10**18, "a batch has 64,000,000,000,000,000,000 tokens: use a smaller"),
        ("lengths", 3, "config: lengths is 3; it must be a group of settings"),
        ("lengths.inputs", [64], "config: lengths.inputs is [64]; it must be a whole number or"),
        ("lengths.width", 3, "config has fields from a different version, or of an annex"),
        ("mixing.temperature", float("nan"), "config: mixing.temperature is nan; it must be a num"),
        ("data.skip", [3], "config: data.skip is [3]; it must be values separated by commas"),
        ("model", {}, "config lacks model.vocab_size"),
        ("model", [], "config: model is []; it must be a group of settings"),
        ("caches", [1], "batches: config.caches is [1]: it must be a dict"),
        ("split", 3, "batches: config.split is 3: it must be a text"),
        ("x\ny", {"z": 1}, "config has fields from a different version, or of an annex"),
    ],
)
def test_values_of_another_type_in_a_configuration(text_cache, path, value, says):
    config = batches(text_cache).config
    table = config
    *groups, name = path.split(".")
    for group in groups:
        table = table[group]
    table[name] = value
    with pytest.raises(UserError) as raised:
        palimpsest.batches(config=config, cache_dir=text_cache)
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param({"seed": HUGE}, "seed is a number of more than 4,300 digits", id="huge"),
        ({"seed": b"1"}, "seed is b'1': it must be a text, a number, true or false"),
        ({"lengths": {"inputs": {1}}}, "lengths.inputs is {1}: it must be a text, a number"),
        ({"lengths": {"inputs": {"x": 1}}}, "unknown flag --lengths.inputs.x"),
        ({"lengths": {1: 2}}, "unknown flag --lengths.1"),
        ({"lengths": [64, 18]}, "unknown flag --lengths"),
        ({"batch_size": float("nan")}, "--batch_size=nan: it must be a whole number"),
        ({"batch_size": [4, "x"]}, "--batch_size=4,x: it must be a whole number"),
        ({"batch_size": 10**15}, "a batch has 64,000,000,000,000,000 tokens: use a smaller"),
        ({"data.skip": [[1]]}, "--data.skip=1: it must be"),
        ({"preset": "a\nb"}, "unknown preset a b"),
        ({"split": ["test"]}, "batches: split is ['test']: it must be a text"),
        ({"task": ""}, "batches: task is empty"),
        ({"model_dir": 3}, "batches: model_dir is 3: it must be a path"),
        ({"config": [("seed", 1)]}, "batches: config is [('seed', 1)]: it must be a dict"),
        ({"task": 3}, "batches: task is 3: it must be a text"),
    ],
)
def test_arguments_of_another_type(text_cache, flags, says):
    with pytest.raises(UserError) as raised:
        batches(text_cache, **flags)
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


def test_numbers_of_any_type(text_cache):
    found = batches(text_cache, train_steps=6)
    assert_equal(found[np.int8(-5)], found[1])
    assert_equal(found[:: np.int64(-2)], [found[5], found[3], found[1]])
    assert found[100:200] == found[3:3] == []
    found.state = np.int64(2)
    assert found.shard(np.int64(1), np.int32(2)).part == (1, 2)
    assert json.dumps([found.state, *found.shard(np.int64(1), np.int32(2)).part]) == "[2, 1, 2]"
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            found[wrong]
        with pytest.raises(UserError, match=r"state is .*: it must be a whole number"):
            found.state = wrong
        with pytest.raises(UserError, match=r"index is .*: it must be a whole number"):
            found.shard(wrong, 2)
        with pytest.raises(UserError, match=r"row is .*: it must be a whole number"):
            found.explain(0, wrong)
    with pytest.raises(TypeError):
        found[1.0:3]
    endless = batches(text_cache)
    assert len(endless[2**40 - 1]["encoder_input_tokens"]) == 4
    with pytest.raises(IndexError):
        endless[2**40]


def test_a_batch_of_more_rows_than_the_data(text_cache):
    assert len(batches(text_cache, batch_size=30_000)[0]["encoder_input_tokens"]) == 30_000
    (whole,) = batches(text_cache, batch_size=30_000, split="validation")
    few = batches(text_cache, split="validation")
    assert_equal({name: array[:8] for name, array in whole.items()}, joined(few[:2]))
    assert not whole["decoder_loss_weights"][4 * len(few) :].any()


def test_a_cache_that_is_deleted(text_cache, tmp_path):
    shutil.copytree(text_cache, tmp_path / TASK)
    found = batches(tmp_path)
    first, pickled = found[0], pickle.dumps(found)
    shutil.rmtree(tmp_path / TASK)
    assert_equal(found[0], first)  # its files are open
    with pytest.raises(UserError, match=r"is missing: run pipeline\.build again"):
        found[:200]
    with pytest.raises(UserError, match="no cache for task"):
        pickle.loads(pickled)


def test_more_mistakes(text_cache):
    with pytest.raises(UserError, match="give one of a task, model_dir and config, not 0"):
        palimpsest.batches()
    mixing = {"max_epochs": 2}
    with pytest.raises(UserError, match="max_epochs divides the rows of the whole run: give train"):
        batches(text_cache, MIXTURE, lengths=LENGTHS, mixing=mixing)
    with pytest.raises(UserError, match=r"x://host: no service has such an address \(known: "):
        palimpsest.batches("x://host", task=TASK)


class Service:
    """A service that opens its own caches."""

    def __init__(self, cache, wanted):
        self.found = palimpsest.batches(config=wanted, cache_dir=cache)
        self.config, self.length = self.found.config, self.found.length

    def batches(self, host=0, hosts=1):
        return self.found.shard(host, hosts)._part

    def explain(self, k, row):
        return self.found.explain(k, row)


def test_an_annex_may_serve_them(text_cache, monkeypatch):
    own = {("batches", "test"): lambda address, wanted: Service(text_cache, wanted)}
    others = annexes.get
    monkeypatch.setattr(annexes, "get", lambda *names: own.get(names) or others(*names))
    flags = {"task": MIXTURE, "batch_size": 4, "lengths": LENGTHS}
    mine = palimpsest.batches(cache_dir=text_cache, **flags)
    served = palimpsest.batches("test://host:1", **flags)
    assert served.config == mine.config
    assert_equal([*itertools.islice(served, 3)], mine[:3])
    assert_equal(served.shard(1, 2)[5], mine.shard(1, 2)[5])
    assert served.explain(5, 3) == mine.explain(5, 3)
    assert len(palimpsest.batches("test://host:1", **flags, train_steps=7)) == 7
    with pytest.raises(UserError, match="test://host:1 opens its own caches: leave out cache_dir"):
        palimpsest.batches("test://host:1", cache_dir=text_cache, **flags)
