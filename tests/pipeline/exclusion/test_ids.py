"""Takedowns by ids, as people write and repeat them."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import verify
from pipeline.build import main
from tasks.terminal.command_line import UserError
from tests.pipeline.exclusion.named_documents import build as build
from tests.pipeline.exclusion.named_documents import held, text, write

pytestmark = pytest.mark.processes


def test_a_line_that_stands_for_a_document_is_not_blank(build, tmp_path, capsys):
    write(tmp_path / "c", "en", {}, ids=True)
    (tmp_path / "ids").write_text("doc1\n\n   \n")
    build(tmp_path / "c/en/*.jsonl", f"--exclude={tmp_path}/ids")
    assert "skipped 1 line of white space" in capsys.readouterr().err


@pytest.mark.parametrize("longest", [500, 3000])
def test_a_document_whose_first_part_is_blank_is_taken_down(build, tmp_path, longest, checksums):
    """Blank parts are not kept, so no file of the cache has the id of the document itself."""
    (tmp_path / "c").mkdir()
    for name in ("other", "secret"):
        lines = "".join(f"<{name}{number}> says it.\n" for number in range(30))
        (tmp_path / "c" / f"{name}.txt").write_text(" " * 1200 * (name == "secret") + lines)
    (tmp_path / "ids").write_text("secret.txt:0\n")
    flags = [
        "--task=lm", "--name=x", f"--corpus=text:{tmp_path}/c/*.txt?document=file&validation=0",
        "--vocabulary=bytes", "--extra_ids=100", f"--max_document_bytes={longest}",
    ]  # fmt: skip
    given = f"--exclude={tmp_path}/ids"
    cache = tmp_path / "a" / "x_lm"
    main([*flags, f"--cache_dir={cache.parent}"])
    assert "secret29" in held(cache.parent)
    assert verify.main([f"--cache={cache}", given]) == 1
    main([*flags, f"--cache_dir={cache.parent}", given])
    assert not any("secret" in name for name in held(cache.parent))
    assert verify.main([f"--cache={cache}", given]) == 0
    for folder in cache.glob(".before-*"):
        shutil.rmtree(folder)
    main([*flags, f"--cache_dir={tmp_path}/b", given])
    assert checksums(cache) == checksums(tmp_path / "b" / "x_lm")


def test_ids_of_several_documents_are_counted(build, tmp_path, capsys, monkeypatch):
    rows = [{"id": f"k{number % 7}", "text": text(f"d{number}")} for number in range(70)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids").write_text("k1\nk9\n")
    build(tmp_path / "a.jsonl")
    line = "63 of 70 documents have the id of another one, such as 'k0', which 10 have: a list of"
    assert line in capsys.readouterr().out
    cache_dir = build(tmp_path / "a.jsonl", f"--exclude={tmp_path}/ids")
    said = capsys.readouterr().out
    assert "left out 10 documents or parts of them, which have 1 ids" in said
    assert "1 of 2 ids are not in the corpus: 'k9'" in said
    assert len(held(cache_dir)) == 60
    assert verify.main([f"--cache={cache_dir}/x_lm", f"--exclude={tmp_path}/ids"]) == 0
    said = capsys.readouterr().out
    assert "absent: all 2 documents of" in said
    assert "1 left out, 1 not in the corpus ('k9')" in said
    # Of a large cache some shards are looked at.
    monkeypatch.setattr("pipeline.building.repeated_ids._MOST", 40)
    build(tmp_path / "a.jsonl", cache_dir=tmp_path / "b")
    assert "documents looked at have the id of another one" in capsys.readouterr().out
    for row in rows:
        del row["id"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(tmp_path / "a.jsonl", cache_dir=tmp_path / "d")
    assert "have the id of another" not in capsys.readouterr().out


def test_documents_of_one_id_that_are_all_held_out(tmp_path):
    rows = [{"id": "same", "text": text(f"d{number}")} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task=lm", "--name=x", "--vocabulary=bytes", "--extra_ids=100"]
    with pytest.raises(UserError, match=r"holds out all 9 for validation, as documents of one id"):
        main(
            [
                *flags,
                f"--corpus=json:{tmp_path}/a.jsonl?validation=0.999",
                f"--cache_dir={tmp_path}",
            ]
        )


def test_a_takedown_by_ids_of_bytes(tmp_path):
    ids = pa.array([f"x{number}".encode() for number in range(9)], pa.binary())
    texts = [text(f"d{number}") for number in range(9)]
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "a.parquet")
    (tmp_path / "ids").write_text("x3\n")
    flags = [
        "--task=lm", "--name=x", "--vocabulary=bytes", "--extra_ids=100",
        f"--cache_dir={tmp_path}/c", f"--corpus=parquet:{tmp_path}/a.parquet?validation=0",
    ]  # fmt: skip
    main(flags)
    main([*flags, f"--exclude={tmp_path}/ids"])
    assert held(tmp_path / "c") == {f"d{number}" for number in range(9)} - {"d3"}
