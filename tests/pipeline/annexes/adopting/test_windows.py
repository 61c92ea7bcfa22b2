"""Windows of adopted caches are those of their rows, whatever the rows' lengths."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.annexes.adopting.adopt import main
from tasks.cache.cache import Cache
from tasks.cache.lineage import Lineage
from tasks.cache.pair_windows import PairWindows, row_windows
from tasks.cache.subset import Take, count
from tasks.cache.windows import Windows
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAIR_BORDER
from tests.support import foreign_caches
from tests.support.window_caches import check, expected


def random_rows(seed, count, longest):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, longest + 1, count)
    # Ids of one to four bytes.
    return [np.exp(generator.random(n) * 11).astype(np.int64) + 2 for n in sizes]


def adopt(folder, *flags):
    main([f"--cache_dir={folder}", *flags])
    return Cache.open(str(folder))


SHARDS = ((300, 40), (1, 900), (0, 0), (5, 0), (700, 3))


@pytest.fixture(scope="module", params=["seqio", "megatron"])
def stream(request, tmp_path_factory):
    """An adopted cache of rows of 0 to 900 tokens, and its tokens by shard."""
    folder = tmp_path_factory.mktemp(request.param) / "mine"
    rows = [random_rows(number, *shape) for number, shape in enumerate(SHARDS)]
    if request.param == "seqio":
        foreign_caches.write_seqio(folder, {"train": [{"targets": [5]}]}, len(SHARDS))
        for number, some in enumerate(rows):
            data = foreign_caches.records({"targets": row, "zzz": b"beside"} for row in some)
            (folder / f"train.tfrecord-{number:05d}-of-{len(SHARDS):05d}").write_bytes(data)
        (folder / "stats.train.json").unlink()  # older versions of seqio wrote none
    else:
        for number, some in enumerate(rows):
            foreign_caches.write_megatron(folder, f"part{number}_document", some, "int32")
    tokens = [np.concatenate([np.zeros(0, np.int64), *some]) for some in rows]
    return types.SimpleNamespace(cache=adopt(folder), streams=tokens, rows=rows)


@settings(max_examples=60)
@given(st.integers(1, 900), st.booleans(), st.booleans(), st.data())
def test_a_stream_of_rows_is_cut_into_windows(stream, length, keep, across, data):
    windows = Windows(
        stream.cache.folder, stream.cache.manifest, "train", length, keep, across_shards=across
    )
    wanted = expected(stream, length, keep, across)
    assert len(windows) == len(wanted)
    assert windows.unread_tokens == sum(map(len, stream.streams)) - sum(map(len, wanted))
    indices = data.draw(st.lists(st.integers(0, max(0, len(wanted) - 1)), max_size=20))
    indices = indices if wanted else []
    check(windows.read(np.array(indices, np.int64)), [wanted[i] for i in indices], length)


def test_a_window_is_located_in_its_rows(stream):
    windows = Windows(stream.cache.folder, stream.cache.manifest, "train", 500)
    lineage = Lineage(stream.cache.folder, stream.cache.manifest, "train")
    tokens_WN, _ = windows.read(np.arange(len(windows)))
    names = {name: number for number, shard in enumerate(stream.cache.manifest.splits["train"])
             for name in shard.files}  # fmt: skip
    for index in range(len(windows)):
        parts = lineage.parts(windows.where(index))
        found = []
        for part in parts:
            name, _, row = part.id.rpartition(":")
            whole = stream.rows[names[name]][int(row)]
            assert part.whole == len(whole)
            assert part.position == len(found)
            found += whole[part.first : part.first + part.tokens].tolist()
        assert found == tokens_WN[index].tolist()


def test_rows_are_windows_on_request(tmp_path):
    rows = [row for row in random_rows(3, 60, 40) if len(row)]
    folder = foreign_caches.write_seqio(tmp_path / "t", {"train": [{"targets": r} for r in rows]})
    cache = adopt(folder, "--packing=rows")
    windows = row_windows(cache.folder, cache.manifest, "train")
    order = np.random.default_rng(0).permutation(len(rows))
    longest = max(map(len, rows))
    check(windows.read(order), [rows[i] for i in order], longest)
    with pytest.raises(UserError, match=r"use longer ones, or adopt it with --packing=concat"):
        Windows(cache.folder, cache.manifest, "train", longest - 1)


def test_documents_are_taken_of_pairs_and_not_of_adopted_streams(stream, tmp_path):
    cache, amount = stream.cache, Take(100, "documents")
    windows = Windows(cache.folder, cache.manifest, "train", 10)
    with pytest.raises(UserError, match="are not known, because it was adopted; give tokens"):
        count(windows, cache.folder, cache.manifest, "train", amount)
    rows = [foreign_caches.pair([9, 8], [7]) for _ in range(150)]
    cache = adopt(foreign_caches.write_seqio(tmp_path / "t", {"train": rows}, 1))
    windows = row_windows(cache.folder, cache.manifest, "train")
    windows.keep_first(count(windows, cache.folder, cache.manifest, "train", amount))
    assert len(windows) == 100


def test_pairs_are_read_without_the_eos_that_the_objective_adds(tmp_path):
    sides = [random_rows(seed, 50, 30) for seed in (1, 2)]
    sides[1][7] = np.array([EOS_ID])
    rows = [
        foreign_caches.pair([*inputs, *([EOS_ID] * (number % 2))], [*targets, EOS_ID])
        for number, (inputs, targets) in enumerate(zip(*sides, strict=True))
    ]
    rows[0] = foreign_caches.pair([9], [9, EOS_ID])
    sides[0][0], sides[1][0] = np.array([9]), np.array([9])
    cache = adopt(foreign_caches.write_seqio(tmp_path / "t", {"train": rows}, 3))
    windows = row_windows(cache.folder, cache.manifest, "train")
    assert isinstance(windows, PairWindows)
    found, lengths = windows.read(np.arange(50))
    for number, (inputs, targets) in enumerate(zip(*sides, strict=True)):
        wanted = [*inputs.tolist(), PAIR_BORDER, *targets.tolist()]
        assert found[number, : lengths[number]].tolist() == wanted
    counts = [shard.adopted for shard in cache.manifest.splits["train"] if shard.adopted]
    assert sum(each.targets_ends for each in counts) == 50
    assert sum(each.inputs_ends for each in counts) == 25
