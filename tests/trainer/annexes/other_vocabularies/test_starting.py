"""Runs that start from parameters of another vocabulary, and their optimizer's state."""

import hashlib
import json
import sys

import jax
import numpy as np
import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from tests.support import eight_devices, own_checkpoints, small_tokenizers
from tests.support.own_checkpoints import MOMENTS, PARAMETERS, V
from tests.support.runs import config_of, stub
from trainer.annexes.other_vocabularies import tensors
from trainer.annexes.other_vocabularies.rows import by_piece
from trainer.checkpoints import layout
from trainer.checkpoints.tensors import held
from trainer.config.from_flags import RunFlags, configured
from trainer.engine.program import Program
from trainer.initialization import init_from, vocabularies
from trainer.model.paths import named

ROWS = 160  # of the new table
TABLE, KERNEL = "token_embedder/embedding", "decoder/logits_dense/kernel"


def make(folder):
    """Writes a run's checkpoint and two vocabularies; returns nothing."""
    own_checkpoints.write(folder / "run")
    lines = small_tokenizers.documents(60)
    for name, part, size in (("old", lines[:30], 100), ("new", lines[30:], 130)):
        small_tokenizers.bert(folder / name, " ".join(part).splitlines(), size=size)


def run_of(folder, *flags):
    given = (f"--init_from={folder}/run", f"--model.vocab_size={ROWS}", "--train_steps=20")
    given += ("--batch_size=8", "--optimizer.min_dim_size_to_factor=8", *flags)
    ids = vocabulary.load(f"{folder}/new", 10).ids
    return stub(config_of(*given), vocab_size=ids.size, ids=ids)


OLD = ("--init_from_vocabulary.path={folder}/old", "--init_from_vocabulary.extra_ids=10")


def started(folder, *flags):
    vocabularies.own_vocabulary = lambda data: data.ids  # in place of a cache's
    run = run_of(folder, *(flag.format(folder=folder) for flag in (*OLD, *flags)))
    start = init_from.start(run)
    return start, start.state(Program(run))


def digest(state):
    found = hashlib.sha256()
    for tree in (state.params, state.opt_state):
        for leaf in jax.tree.leaves(tree):
            found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make(folder)
    return folder


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setattr(vocabularies, "own_vocabulary", lambda data: data.ids)


def expected(folder):
    old, new = vocabulary.load(f"{folder}/old", 10).ids, vocabulary.load(f"{folder}/new", 10).ids
    rows = by_piece(old, new, V, ROWS)
    assert rows.carried > 40
    assert rows.spelled > 10
    return old, rows


def means(table, old, rows):
    """Returns new rows of a table, one by one."""
    whole = table[: old.size].astype("f8")
    return np.array(
        [
            table[[row for row in line if row >= 0]].astype("f8").mean(0)
            if (line >= 0).any()
            else whole.mean(0)
            for line in rows.sources
        ]
    ).astype("f4")


@pytest.mark.parametrize("scanned", [False, True])
def test_tables_and_moments_get_new_rows(scanned, folder):
    old, rows = expected(folder)
    start, state = started(folder, f"--model.scan_layers={scanned}")
    assert f"vocabulary: {rows}" in start.describe()
    assert "make sure it is this run's" not in start.describe()
    assert start.reset is None
    params = named(state.params)
    np.testing.assert_array_equal(params[TABLE], means(PARAMETERS[TABLE], old, rows))
    np.testing.assert_array_equal(params[KERNEL], means(PARAMETERS[KERNEL].T, old, rows).T)
    one = np.flatnonzero((rows.sources >= 0).sum(1) == 1)
    first = rows.sources[one, 0]
    np.testing.assert_array_equal(np.asarray(params[TABLE])[one], PARAMETERS[TABLE][first])
    # Adafactor divides the gradient of a carried row by what it divided it by before.
    for name, axis in ((TABLE, 0), (KERNEL, 1)):
        before = second_moments(
            *(MOMENTS[f"{name}/{kind}"] for kind in ("v_row", "v_col")), PARAMETERS[name].shape
        )
        shape = params[name].shape
        factored = state.opt_state[0]
        after = second_moments(*(np.asarray(named(getattr(factored, kind))[name])
                                 for kind in ("v_row", "v_col")), shape)  # fmt: skip
        np.testing.assert_allclose(
            after.take(one, axis), before.take(first, axis), rtol=1e-5, err_msg=name
        )


def second_moments(row, column, shape):
    over_row, over_column = layout.by_size(shape)
    return np.expand_dims(row / row.mean(), over_row) * np.expand_dims(column, over_column)


@pytest.mark.processes
def test_every_part_of_every_device_has_the_same_bits(folder):
    _, state = started(folder)
    found = eight_devices.run(
        __file__, str(folder), "--mesh.fsdp=2", "--mesh.tensor=4", "--model.scan_layers=false"
    )
    assert found == {"devices": 8, "digest": digest(state)}


# Less than the old 128 rows, between these and the new 160, and more than both.
@pytest.mark.parametrize("width", [8, 140, 200])
def test_moments_of_a_run_of_ours_follow_their_rows(width, folder):
    """Moments of Adam change as the parameters; Adafactor's factors also with the longer axis."""
    old, rows = expected(folder)
    random = np.random.default_rng(0)
    table = random.random((V, width)).astype("f4")
    row, column = table.mean(0 if width < V else 1), table.mean(1 if width < V else 0)
    state = {
        f"0/mu/{TABLE}": held(table),
        f"0/v_row/{TABLE}": held(row),
        f"0/v_col/{TABLE}": held(column),
        f"0/v/{TABLE}": held(np.zeros(1, "f4")),
        "0/count": held(np.int32(7)),
        "0/mu/encoder/encoder_norm/scale": held(np.ones(width, "f4")),
    }
    made = tensors.changed_state(state, {TABLE: table.shape}, {TABLE: 0}, rows)
    assert made.keys() == state.keys()
    np.testing.assert_array_equal(made[f"0/mu/{TABLE}"].whole(), means(table, old, rows))
    assert made["0/count"].whole() == 7
    one = np.flatnonzero((rows.sources >= 0).sum(1) == 1)
    before = second_moments(row, column, table.shape)
    after = second_moments(
        made[f"0/v_row/{TABLE}"].whole(), made[f"0/v_col/{TABLE}"].whole(), (ROWS, width)
    )
    np.testing.assert_allclose(after[one], before[rows.sources[one, 0]], rtol=1e-5)


def test_mistakes_are_named(folder, tmp_path, monkeypatch):
    def error_of(*flags, own=None):
        run = run_of(folder, *flags)
        if own:
            monkeypatch.setattr(vocabularies, "own_vocabulary", own)
        with pytest.raises(UserError) as caught:
            init_from.start(run)
        return str(caught.value)

    flag = "--init_from_vocabulary"
    assert "no vocabulary at" in error_of(f"{flag}.path={tmp_path}/none")
    assert "no JSON file at" in error_of(f"{flag}.id_map={tmp_path}")
    (tmp_path / "id_map.json").write_text(json.dumps([0, 0]))
    assert "gives two old ids the same new one" in error_of(f"{flag}.id_map={tmp_path}")
    (tmp_path / "id_map.json").write_text(json.dumps([None] * 100))
    assert "gives no old id a new one" in error_of(f"{flag}.id_map={tmp_path}")
    (tmp_path / "id_map.json").write_text("{}")
    assert "not a list" in error_of(f"{flag}.id_map={tmp_path}")
    assert "its table 128 rows" in error_of(f"{flag}.path={folder}/old", f"{flag}.extra_ids=90")
    small_tokenizers.bert(tmp_path / "foreign", ["абв где жзи клм"] * 3)
    assert "no piece of text in common" in error_of(f"{flag}.path={tmp_path}/foreign")
    assert "has no effect" in error_of(f"{flag}.path={folder}/old", own=lambda data: None)
    for flags, words in (
        ([f"{flag}.extra_ids=10"], "without init_from_vocabulary.path"),
        ([f"{flag}.path=a", f"{flag}.id_map=b"], "left out if init_from_vocabulary.path"),
    ):
        with pytest.raises(UserError, match=words):
            run_of(folder, *flags)
    with pytest.raises(UserError, match="has no effect without --init_from"):
        configured(made(RunFlags, parse(RunFlags, ["--preset=t5_1_1_tiny", f"{flag}.path=a"])))


def test_a_map_needs_no_old_vocabulary(folder, tmp_path):
    ids = vocabulary.load(f"{folder}/new", 10).ids
    id_map = [number if number < 60 else None for number in range(V)]
    (tmp_path / "id_map.json").write_text(json.dumps(id_map))
    run = run_of(folder, f"--init_from_vocabulary.id_map={tmp_path}")
    start = init_from.start(run)
    table = start.parameters[TABLE].whole()
    np.testing.assert_array_equal(table[:60], PARAMETERS[TABLE][:60])
    assert start.rows.startswith("60 rows carried")
    assert start.rows.endswith(f"{V - 60} dropped")
    assert len(table) == ROWS >= ids.size


if __name__ == "__main__":
    _, made = started(sys.argv[1], *sys.argv[2:])
    print(json.dumps({"devices": jax.device_count(), "digest": digest(made)}))
