"""palimpsest compare finds a planted difference of each kind, and nothing between equal runs."""

import dataclasses
import json
import math
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict

from tasks.cache import manifest as manifests
from tasks.cache import records
from tasks.cache.row_index import read_row_index
from tasks.storage import files, seal
from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.support.runs import TASK
from trainer import loop
from trainer.annexes.comparing import compare, settings, steps, tensors
from trainer.checkpoints import metadata
from trainer.engine import checksums
from trainer.model.paths import named

pytestmark = pytest.mark.processes  # whole runs

STEPS = 12


def trained(cache_dir, model_dir):
    """Returns the folder of a run of 12 updates, reported and saved every 4."""
    return runs.trained(
        *(cache_dir, model_dir, f"--train_steps={STEPS}", "--metrics.every_steps=4"),
        *("--metrics.tensorboard=false", "--evaluation.every_steps=0"),
        *("--checkpoint.every_steps=4", "--checkpoint.keep=None"),
    )


@pytest.fixture(scope="module")
def base(text_cache, tmp_path_factory):
    return trained(text_cache.parent, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def found(base, capsys):
    """Returns a function that compares the base run with another one, as JSON and as text."""

    def run(other, *flags):
        capsys.readouterr()  # of the training
        code = compare.main([str(base), str(other), "--json", *flags])
        value = json.loads(capsys.readouterr().out)
        assert compare.main([str(base), str(other), *flags]) == code
        assert code == (0 if value["same"] else compare.EXIT_DIFFERENT)
        return value, capsys.readouterr().out

    return run


def copied(base, target, **changes):
    """Copies a run, with fields of its configuration changed."""
    shutil.copytree(base, target)
    path = target / "config.json"
    value, _ = seal.opened(json.loads(path.read_text()))
    for name, changed in changes.items():
        group, _, leaf = name.rpartition("__")
        (value["config"][group] if group else value["config"])[leaf] = changed
    path.write_text(json.dumps(value))
    return target


def test_equal_runs_are_the_same(base, found, tmp_path):
    # Fields that change nothing are shown and do not count.
    other = copied(base, tmp_path / "model", data__prefetch=2)
    value, said = found(other, "--batches=3", "--verify=all")
    assert value["same"]
    assert [each["path"] for each in value["configuration"]] == ["data.prefetch"]
    assert value["data"]["compared"] == [1, 3]
    assert value["step"]["lines"] == 3
    assert value["tensor"]["verified"] == [4, 8, 12]
    assert value["tensor"]["arrays"] > 100
    assert "the runs are the same" in said
    assert compare.main([str(base), str(base)]) == 0


def test_a_field_is_found(found, base, tmp_path):
    value, said = found(copied(base, tmp_path / "model", optimizer__learning_rate=0.02))
    assert value["first"] == "configuration"
    (field,) = value["configuration"]
    assert field["path"] == "optimizer.learning_rate"
    assert field["values"][1] == 0.02
    assert field["effect"] == "results"
    assert value["differing"] == ["configuration"]
    assert "first difference: configuration, optimizer.learning_rate" in said


def test_another_seed_makes_other_batches(found, base, tmp_path):
    value, _ = found(copied(base, tmp_path / "model", seed=1))
    assert value["differing"] == ["configuration", "data"]
    batch = value["data"]["batch"]
    assert (batch["step"], batch["row"], batch["position"]) == (1, 0, 0)
    assert batch["rows"] == 4
    assert all(line.startswith("row 0: ") for line in batch["documents"])
    # It was trained on other examples than it says: the copy's record is the first run's.
    assert value["data"]["compared"] == [1, STEPS]


def varint(token):
    return bytes([token]) if token < 128 else bytes([token & 127 | 128, token >> 7])


def with_another_token(cache, target, number, row, place):
    """Copies a cache with a token of a row of a shard changed; returns (folder, old id, new id)."""
    shutil.copytree(cache, target / TASK)
    held = manifests.CacheManifest.load(str(target / TASK))
    name = manifests.shard_file("train", "tfrecord", number, held.plan.shards["train"])
    index = manifests.shard_file("train", "rows", number, held.plan.shards["train"])
    offsets = read_row_index(
        str(target / TASK / index), held.splits["train"][number].rows, held.plan.remedy
    )["offset"].tolist()
    data = bytearray((target / TASK / name).read_bytes())
    begin, end = offsets[row], offsets[row + 1]
    body = bytes(records.unframe(bytes(data[begin:end])))
    tokens = records.decode_row(body).tokens.tolist()
    old = tokens[place]
    new = next(t for t in range(5, 120) if t != old) if old < 128 else 130 + (old == 130)
    whole = b"".join(map(varint, tokens))
    at = body.index(whole) + len(b"".join(map(varint, tokens[:place])))
    changed = body[:at] + varint(new) + body[at + len(varint(old)) :]
    assert len(changed) == len(body)
    data[begin + 12 : end - 4] = changed
    data[end - 4 : end] = records.masked_crc(changed).to_bytes(4, "little")
    (target / TASK / name).write_bytes(data)
    shard = held.splits["train"][number]
    entry = manifests.FileEntry(len(data), files.sha256(str(target / TASK / name)))
    sealed = dataclasses.replace(shard, files={**shard.files, name: entry})
    shards = (*held.splits["train"][:number], sealed, *held.splits["train"][number + 1 :])
    changed_manifest = dataclasses.replace(held, splits={**held.splits, "train": shards})
    (target / TASK / "manifest.json").write_bytes(changed_manifest.content())
    return target, old, new


def test_one_token_of_one_row_is_found(found, base, text_cache, tmp_path):
    from trainer.annexes.comparing.explanation import Explanation

    # The window of the second row of the batch of update 6, and where a shard stores it.
    explanation = Explanation(str(base), 6)
    place = explanation.row(1).places[0]
    width = manifests.CacheManifest.load(str(text_cache)).plan.row_tokens
    below, inside = divmod(place.position + 5, width)
    cache_dir, old, new = with_another_token(
        text_cache, tmp_path / "cache", place.shard, place.row + below, inside
    )
    value, said = found(trained(cache_dir, tmp_path / "model"))
    batch = value["data"]["batch"]
    assert (batch["step"], batch["row"]) == (6, 1)
    assert batch["values"] == [old, new]
    assert f"row 1, {batch['feature']} at position {batch['position']}" in said
    assert value["step"]["first"]["step"] == 8
    assert value["tensor"]["step"] == 8
    assert value["differing"] == ["data", "step", "tensor"]
    assert all(len(pieces) > 0 for pieces in batch["pieces"])


def test_a_dropped_update_is_found(found, text_cache, tmp_path, monkeypatch):
    real = loop.Program

    def dropping(run):
        program = real(run)
        update = program.train_step

        def train_step(state, batch):
            if int(state.step) == 5:  # the sixth update counts and changes nothing
                return dataclasses.replace(state, step=state.step + 1)
            return update(state, batch)

        program.train_step = train_step
        return program

    monkeypatch.setattr(loop, "Program", dropping)
    value, said = found(trained(text_cache.parent, tmp_path / "model"))
    assert value["first"] == "step"
    assert value["step"]["first"]["step"] == 8
    assert value["step"]["first"]["after"] == 4
    # The batches between the equal report and this one are the same.
    assert value["data"]["compared"] == [5, 8]
    assert value["tensor"]["step"] == 8
    assert value["tensor"]["counts"]
    assert all(pair == [8, 7] for pair in value["tensor"]["counts"].values())
    assert "is 8 and 7: B made 1 fewer" in said


def with_a_flipped_bit(base, target, bit, name="decoder/decoder_norm/scale", sealed=True):
    """Copies a run with one bit of element 3 of a parameter flipped in its newest checkpoint."""
    shutil.copytree(base, target)
    folder = target / f"checkpoint_{STEPS}"
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore((folder / "state").resolve())
        leaves = named(state["params"])
        array = np.array(leaves[name])
        array.reshape(-1).view(np.uint32)[3] ^= np.uint32(1 << bit)
        state["params"] = unflatten_dict(leaves | {name: array}, sep="/")
        shutil.rmtree(folder / "state")
        checkpointer.save((folder / "state").resolve(), state)
    if sealed:
        stored = metadata.read(str(folder))[metadata.CHECKSUMS]
        changed = {**stored, f"params/{name}": checksums.of_array(array)}
        metadata.update(str(folder), **{metadata.CHECKSUMS: changed})
    return target


@pytest.mark.parametrize("sealed", [True, False])
def test_one_flipped_bit_of_a_tensor_is_found(found, base, tmp_path, sealed):
    value, said = found(with_a_flipped_bit(base, tmp_path / "model", bit=2, sealed=sealed))
    assert value["differing"] == ["tensor"]
    assert value["tensor"]["step"] == STEPS
    (found_in,) = value["tensor"]["differences"]
    assert found_in["name"] == "params/decoder/decoder_norm/scale"
    assert (found_in["differing"], found_in["index"], found_in["ulps"]) == (1, [3], 4)
    assert found_in["damaged"] == (None if sealed else 1)
    assert "first difference: tensor, params/decoder/decoder_norm/scale of checkpoint 12" in said
    assert ("B is damaged" in said) != sealed


def test_checkpoints_are_read_as_far_as_their_checksums_say(found, base, tmp_path):
    other = with_a_flipped_bit(base, tmp_path / "model", bit=2, sealed=False)
    value, said = found(other, "--verify=none")
    assert value["same"]
    assert "read: none" in said
    for step in (4, 8, STEPS):
        shutil.rmtree(other / f"checkpoint_{step}" / "run")
    value, said = found(other, "--verify=none")
    assert value["tensor"]["verified"] == [4, 8, STEPS]
    assert [each["index"] for each in value["tensor"]["differences"]] == [[3]]
    assert "lacks checksums in a run" in said


@pytest.mark.parametrize("part", ["state", "run"])
def test_a_checkpoint_that_cannot_be_read_is_named(found, base, tmp_path, part):
    shutil.copytree(base, tmp_path / "model")
    place = tmp_path / "model" / f"checkpoint_{STEPS}" / part
    for path in place.rglob("d/*" if part == "state" else "metadata"):
        path.write_bytes(path.read_bytes()[:100])
    value, said = found(tmp_path / "model")
    assert value["tensor"]["step"] == STEPS
    assert value["tensor"]["differences"][0]["damaged"] == 1
    assert "B cannot be read" in said


def test_runs_without_metrics_or_checkpoints_are_compared_as_far_as_they_go(found, base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    for path in (tmp_path / "model").glob("checkpoint_*"):
        shutil.rmtree(path)
    (tmp_path / "model" / "metrics.jsonl").unlink()
    value, said = found(tmp_path / "model")
    assert value["same"]
    assert "no line that both runs have" in said
    assert "no checkpoint of a step that both runs have" in said
    assert "but neither metrics nor checkpoints are in both" in said
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(UserError, match="holds no run"):
        compare.main([str(base), str(tmp_path / "model")])


def test_moved_caches_can_be_named(found, base, text_cache, tmp_path):
    moved = copied(base, tmp_path / "model", cache_dir=str(tmp_path / "gone"))
    value, said = found(moved)
    assert value["same"]
    assert "no batch could be compared" in said
    assert "batches cannot be made again" in said
    with pytest.raises(UserError, match="gone"):  # asked for, they are not passed over
        compare.main([str(base), str(moved), "--batches=2"])
    with pytest.raises(UserError, match="--batches=-2: it must be -1 or more"):
        compare.main([str(base), str(moved), "--batches=-2"])
    flag = f"--cache_dir={text_cache.parent}"
    value, _ = found(tmp_path / "model", "--batches=2", flag, flag)
    assert value["data"]["compared"] == [1, 2]
    with pytest.raises(UserError, match="give it twice"):
        compare.main([str(base), str(base), flag])


def test_effects_of_fields_and_equal_metrics():
    assert settings.effect("mixing.schedule") == settings.RESULTS
    assert settings.effect("mesh.data") == settings.ROUNDING
    assert settings.effect("metrics.every_steps") == settings.NONE
    assert settings.effect("data.block_bytes", idle=True) == settings.NONE
    assert steps.same(math.nan, math.nan)
    assert not steps.same(0.0, -0.0)
    assert not steps.same(1.0, math.nextafter(1.0, 2.0))
    assert not steps.same(1, None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32"])
def test_elements_are_described(dtype):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    one = np.arange(12, dtype=np.float32).reshape(3, 4).astype(kind)
    other = one.copy()
    flat = other.reshape(-1).view(f"uint{8 * kind.itemsize}")
    flat[6] += 3
    flat[9] += 1
    found = tensors.describe("a", dtype, one, other)
    assert (found.differing, found.elements, found.index) == (2, 12, (1, 2))
    assert found.ulps == (None if dtype == "int32" else 3)
    assert found.largest == float(np.abs(one.astype(float) - other.astype(float)).max())
    zero = tensors.describe("a", dtype, one, one)
    assert zero.differing == 0


def test_a_sign_is_many_numbers_away_and_nan_has_no_distance():
    one = np.array([1e-45, 1.0], np.float32)
    found = tensors.describe("a", "float32", one, -one)
    assert found.ulps == 2 * int(np.float32(1.0).view(np.uint32))
    found = tensors.describe("a", "float32", one, np.array([math.nan, 1.0], np.float32))
    assert found.largest is None
    assert found.differing == 1
