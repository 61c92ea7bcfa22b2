"""--dry_run predicts the build's size and time, and writes nothing."""

import json
import re

import pytest

from pipeline.annexes.dry_runs import estimate
from tasks.cache.manifest import CacheManifest
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.parameters import slow_unless
from tests.tasks.reading.test_small_files import folder as folder

TASK = "python_docs_span_corruption"


def predicted(out: str) -> dict[str, list[float]]:
    """Returns the numbers of each line of the table, without their errors, by the line's name."""
    lines = (re.split(r"  +", line.replace(",", "")) for line in out.splitlines())
    return {
        name: [float(cell.split()[0]) for cell in cells] for name, *cells in lines if name and cells
    }


def test_a_small_corpus_is_predicted_exactly(build, flags, cache, tmp_path, capsys):
    build(tmp_path, "--dry_run")
    assert not list(tmp_path.iterdir())
    out = capsys.readouterr().out
    table = predicted(out)
    manifest = CacheManifest.load(str(cache))
    for field in ("documents", "tokens", "rows"):
        assert table[field] == [manifest.total(split, field) for split in manifest.plan.shards]
    assert table["shards"] == list(manifest.plan.shards.values())
    assert "8 pieces, 0 of them built" in out
    assert float(re.search(r"in ([\d.]+) s with --workers=1", out)[1]) > 0


@pytest.mark.parametrize("workers", slow_unless({1}, [1, 2]))
def test_a_sample_is_scaled_up(build, cache, tmp_path, monkeypatch, capsys, workers):
    monkeypatch.setattr(estimate, "SAMPLE_BYTES", 300_000)
    monkeypatch.setattr(estimate, "_SLICE_BYTES", 10_000)
    build(tmp_path, "--dry_run", f"--workers={workers}")
    out = capsys.readouterr().out
    manifest = CacheManifest.load(str(cache))
    size = manifest.plan.corpus["files"][0]["bytes"]
    sampled = float(re.search(r"sampled ([\d.]+) MB", out)[1])
    assert 0.25 < sampled < 0.4 < size / 1e6
    for field in ("documents", "tokens"):
        (line,) = [line for line in out.splitlines() if line.startswith(field)]
        value, error = re.search(r"([\d,]+) ± ([\d.]+)%", line).groups()
        actual = manifest.total("train", field)
        assert abs(float(value.replace(",", "")) / actual - 1) < 3 * float(error) / 100 < 0.5


def test_finished_pieces_need_no_time(build, cache, tmp_path, capsys):
    (tmp_path / TASK).mkdir()
    for path in cache.iterdir():
        if path.name not in ("manifest.json", "COMPLETED", "train.receipt-00003-of-00008.json"):
            (tmp_path / TASK / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / TASK).iterdir()}
    build(tmp_path, "--dry_run")
    assert "8 pieces, 7 of them built" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / TASK).iterdir()}
    with pytest.raises(UserError, match="row_tokens: 100, there: 568"):
        build(tmp_path, "--dry_run", "--row_tokens=100")


def test_parquet_with_its_own_validation_split(build, documents, tmp_path, monkeypatch, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = list(documents.values())
    for name, part in (("train", texts[:1500]), ("validation", texts[1500:])):
        pq.write_table(pa.table({"text": part}), tmp_path / f"{name}.parquet", row_group_size=50)
    monkeypatch.setattr(estimate, "SAMPLE_BYTES", 200_000)
    monkeypatch.setattr(estimate, "_SLICE_BYTES", 20_000)
    corpus = f"--corpus=parquet:{tmp_path}/*.parquet?split=train"
    build(tmp_path / "cache", corpus, "--dry_run")
    table = predicted(capsys.readouterr().out)
    assert table["documents"][0] == pytest.approx(1500, rel=0.3)
    assert table["documents"][1] == pytest.approx(len(texts) - 1500, rel=0.3)


def test_json_is_all_of_standard_output(build, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one line\n" * 30)
    (tmp_path / "ids").write_text("a.txt:3\n \n")
    flags = (f"--exclude={tmp_path}/ids", "--dry_run", "--json")
    build(tmp_path / "cache", f"--corpus=text:{tmp_path}/a.txt", *flags)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["counts"]
    assert "every line is a document" in printed.err
    assert "skipped 1 line of white space alone" in printed.err


@pytest.mark.parametrize("size", [100, 1000, 5000, 20_000])
def test_slices_of_joined_pieces_are_alike(folder, size):
    corpus = sources.resolve(sources.parse(f"text:{folder}/*?validation=0"))
    (first, *_) = corpus.pieces
    count = estimate._slices(first, size)
    slices = [estimate._slice(first, size, number) for number in range(count)]
    assert all(each.parts for each in slices)
    covered = {(part.file.name, part.start) for each in slices for part in each.parts}
    assert len({name for name, _ in covered}) == len(first.parts)
    sizes = [each.bytes for each in slices]
    assert sum(sizes) / count == pytest.approx(first.bytes / count, rel=1.5)
