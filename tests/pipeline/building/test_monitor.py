"""The state of a running build, as its progress bar shows it."""

import shutil

from pipeline.building.graph import Assignment
from pipeline.building.monitor import Monitor
from tasks.cache.manifest import CacheManifest
from tasks.reading import sources


def test_a_build_without_finished_pieces_says_why(cache, tmp_path):
    plan = CacheManifest.load(str(cache)).plan
    piece = sources.Piece("a.txt", ("train",), 1000, False, "text")
    first, second = (Assignment(piece, (("train", number),)) for number in (0, 1))
    monitor = Monitor(str(tmp_path), plan, {}, [first, second])
    monitor.look()
    assert monitor.note == "starting; the first build on a machine also compiles its tokenizer"
    for path in cache.glob("*-00000-of-*"):
        shutil.copy(path, tmp_path)
    monitor.look()
    assert "MB/s" in monitor.note
    assert monitor.done == 1000
    assert monitor.unseen == 0.5
