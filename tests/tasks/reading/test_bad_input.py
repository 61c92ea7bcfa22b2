"""Bad input in every format with columns: one line that names the file and what to do."""

import pathlib

import pytest

from tasks.terminal.command_line import UserError
from tests.support.corpora import IN_EVERY_FORMAT, in_every_format, known, read

FORMATS = IN_EVERY_FORMAT
ROWS = {f"document {n}": f"text of {n}, " * 9 for n in range(300)}


@pytest.fixture
def corpora(tmp_path):
    return in_every_format(tmp_path, ROWS)


def path_of(spec):
    return pathlib.Path(spec.partition(":")[2].partition("?")[0])


def refused(spec):
    with pytest.raises(UserError) as caught:
        read(spec)
    line = str(caught.value)
    assert "\n" not in line
    return line


def with_option(spec, option):
    return spec.rstrip("&") + ("&" if "?" in spec else "?") + option


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_column_names_those_that_are_there(corpora, form):
    spec = corpora[form]
    options = [with_option(spec, "column=txet"), with_option(spec, "id=identity")]
    options.append(with_option(spec, "inputs={question} </s> {text}&targets=text"))
    advices = ("add ?column=NAME", "give another ?id=NAME", "name other columns in ?inputs=…")
    names = ("txet", "identity", "question")
    for wanted, option, advice in zip(names, options, advices, strict=True):
        line = refused(option)
        assert advice in line
        assert f"{path_of(spec)} has no column {wanted}" in line
        assert "it has " in line
        assert "text" in line.partition("it has ")[2]
    assert "did you mean text?" in refused(options[0])


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_file_is_one_line(corpora, form):
    path_of(corpora[form]).write_bytes(b"")
    line = refused(corpora[form])
    assert path_of(corpora[form]).name in line
    assert "is empty" in line or "cannot be read" in line


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kept", [0.3007, 0.9907])  # inside a row
def test_a_file_cut_short_is_named_or_costs_one_record(corpora, form, kept):
    path = path_of(corpora[form])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    if form in ("parquet", "arrow stream", "arrow file", "csv.gz"):
        assert f"{path} cannot be read: " in refused(corpora[form])
        return
    rows = read(corpora[form])
    (problem,) = [row["problem"] for row in rows if row["problem"]]
    assert problem in ("invalid JSON", "invalid CSV", "wrong number of fields", "record cut short")
    good = {row["id"]: row["text"] for row in rows if not row["problem"]}
    assert good.items() <= ROWS.items()
    assert len(good) >= int(kept * len(ROWS)) - 3


@pytest.mark.parametrize("form", known("json", "csv", "tsv"))
def test_utf_16_is_named(corpora, form):
    path = path_of(corpora[form])
    path.write_bytes(path.read_text().encode("utf-16"))
    line = refused(corpora[form])
    assert str(path) in line
    assert "UTF-16" in line or "no JSON object" in line


ENCODINGS = ("utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", ["a line\n", "o linie în română\n", "новая строка\n"])
def test_other_encodings_of_plain_text_are_named(tmp_path, encoding, text):
    (tmp_path / "a.txt").write_text(text * 9, encoding=encoding)
    for document in ("line", "file", "block"):
        line = refused(f"text:{tmp_path}/a.txt?document={document}")
        assert "a.txt cannot be read: " in line
        assert f": convert it to UTF-8, e.g. with iconv -f {encoding} -t utf-8" in line


def test_text_with_a_few_nuls_is_read(tmp_path):
    (tmp_path / "a.txt").write_text(("a long line with a NUL\0" + "!" * 20 + "\n") * 9)
    assert len(read(f"text:{tmp_path}/a.txt")) == 9


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_other_formats_in_a_pattern_are_named(corpora, form):
    kind, folder = corpora[form].partition(":")[0], path_of(corpora[form]).parent
    line = refused(f"{kind}:{folder}/*")
    assert str(folder) in line
    said = (" cannot be read", "has no column", "is Parquet", "is not JSON lines")
    assert any(words in line for words in said)
