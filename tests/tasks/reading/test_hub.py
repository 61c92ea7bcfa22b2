"""Data sets of the Hugging Face Hub, read from a small local Hub."""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.reading import stdlib_docs
from tests.support.corpora import write_json
from tests.support.parameters import slow_unless
from tests.support.servers.hub import HubServer

pytestmark = pytest.mark.processes

COMMIT = "c0ffee" * 6 + "abcd"
TOKEN = "hf_secret_of_mine"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    return folder


@pytest.fixture
def hub(with_hub, folder):
    """Returns a function that runs Python with a private Hub without faults."""
    with HubServer(folder) as server:

        def run(*arguments, token="", endpoint=server.url, **more):
            return with_hub(endpoint, *arguments, token=token, **more)

        run.folder, run.server = folder, server
        yield run


READ = """
import json, pickle, sys
from tasks.reading import sources
corpus = sources.resolve(sources.parse(sys.argv[1]), 20_000)
rows = [
    (split, *list(row.values())[:3])
    for piece in pickle.loads(pickle.dumps(corpus.pieces))
    for split, batch in sources.read(corpus, piece)
    for row in batch.to_pylist()
]
print(json.dumps([corpus.record, rows]))
assert b"hf_secret_of_mine" not in pickle.dumps(corpus)
"""


READ_PLAINLY = """
from tasks.reading import sources
from tasks.terminal.command_line import run
run(lambda _: list(sources.documents("hf:an/owner?validation=0")), [])
"""


def test_a_private_data_set_is_read_with_a_token_and_pinned(hub):
    for split, texts in (("train", ["one", "two"]), ("validation", ["three"])):
        table = pa.table({"id": [f"{split}{i}" for i in range(len(texts))], "text": texts})
        pq.write_table(table, hub.folder / f"data/{split}-00000-of-00001.parquet")
    done = hub("-c", READ, "hf:an/owner", token=TOKEN)
    assert done.returncode == 0, done.stderr
    record, rows = json.loads(done.stdout)
    assert rows == [
        ["train", "train0", "one", None],
        ["train", "train1", "two", None],
        ["validation", "validation0", "three", None],
    ]
    assert record["spec"] == f"hf:an/owner@{COMMIT}"
    assert [file["name"] for file in record["files"]] == [
        "data/train-00000-of-00001.parquet",
        "data/validation-00000-of-00001.parquet",
    ]
    assert all(file.get("etag") or file.get("sha256") for file in record["files"])
    pinned = hub("-c", READ, f"hf:an/owner@{COMMIT}", token=TOKEN)
    assert json.loads(pinned.stdout)[0] == record


def test_row_groups_are_read_ahead_across_pieces_despite_faults(with_hub, folder):
    texts = [f"{number} " * 100 for number in range(900)]
    table = pa.table({"other": texts, "text": texts, "id": [str(n) for n in range(900)]})
    path = folder / "data/train.parquet"
    pq.write_table(table, path, row_group_size=200, use_dictionary=False, compression=None)
    with HubServer(folder, faults=0.2) as server:
        done = with_hub(server.url, "-c", READ, "hf:an/owner?validation=0", token=TOKEN)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)[1]
    assert rows == [["train", str(number), text, None] for number, text in enumerate(texts)]
    asked = [path for _, path, fault in server.seen if "train.parquet" in path and not fault]
    assert len(asked) < 40  # 5 row groups of two columns, in 17 pieces


def read_hub(hub, corpus="hf:an/owner?validation=0"):
    done = hub("-c", READ, corpus, token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return json.loads(done.stdout)


def test_csv_tsv_and_arrow_of_the_hub_are_read(hub):
    (hub.folder / "data/train.csv").write_text('id,text\na,"one, ""1""\nline"\nb,two\n')
    rows = [["train", "a", 'one, "1"\nline', None], ["train", "b", "two", None]]
    record, found = read_hub(hub)
    assert found == rows
    (hub.folder / "data/train.csv").rename(hub.folder / "data/train.tsv")
    (hub.folder / "data/train.tsv").write_text('id\ttext\na\t"tab\t"\nb\tx"y\n')
    record, found = read_hub(hub)
    assert [row[2] for row in found] == ["tab\t", 'x"y']
    assert "delimiter=%09" in record["spec"]
    _, found = read_hub(hub, "hf:an/owner?quote=none&validation=0")
    assert [row[3] for row in found] == ["wrong number of fields", None]
    (hub.folder / "data/train.tsv").unlink()
    table = pa.table({"id": ["a", "b"], "text": ["one", None]})
    with pa.ipc.new_stream(hub.folder / "data/train.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read_hub(hub)[1] == [["train", "a", "one", None], ["train", "b", None, "null"]]


def write_readme(hub, settings):
    (hub.folder / "data/train.csv").write_text("a;one\nb;two\n")
    (hub.folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: data/train.csv\n  {settings}\n---\n"
    )


def test_a_readme_says_how_csv_is_read(hub):
    write_readme(hub, 'sep: ";"\n  names: [id, text]')
    record, found = read_hub(hub)
    assert [row[1:3] for row in found] == [["a", "one"], ["b", "two"]]
    assert "columns=id%2Ctext&delimiter=%3B" in record["spec"]


def test_a_readme_whose_settings_cannot_be_followed_is_one_line(hub, tmp_path):
    write_readme(hub, "skiprows: 1")
    line = refused(hub(*train(tmp_path, "hf:an/owner"), token=TOKEN))
    assert "sets skiprows for its CSV files, which is not supported" in line


# --- a network that fails


@pytest.mark.parametrize("seed", slow_unless({0}, range(3)))
def test_faults_of_every_kind_do_not_change_what_is_read(with_hub, folder, seed):
    documents = list(stdlib_docs.documents().items())[:400]
    write_json(folder / "data/train.jsonl", dict(documents))
    (folder / "data/validation.jsonl").write_text('{"id": "v", "text": "small"}\n')
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n"
        "  data_files: [{split: train, path: data/train*}]\n---\n")  # fmt: skip
    with HubServer(folder, faults=0.5, seed=seed) as server:
        done = with_hub(server.url, "-c", READ, "hf:an/owner?validation=0", token=TOKEN)
    assert done.returncode == 0, done.stderr
    # If the README had been given up on, there would be a validation split.
    assert json.loads(done.stdout)[1] == [["train", *pair, None] for pair in documents]
    assert len({fault for _, _, fault in server.seen} - {""}) > 4


def test_a_lasting_failure_is_one_line_that_says_how_to_resume(with_hub, folder):
    (folder / "data/train.jsonl").write_text('{"text": "x"}\n' * 5)
    arguments = ("-m", "vocab.train", "--corpus=hf:an/owner", f"--output={folder.parent}/out")
    with HubServer(folder, always="503") as server:
        done = with_hub(server.url, *arguments, token=TOKEN, PALIMPSEST_RETRY_SECONDS="0.3")
    line = refused(done)
    assert "data/train.jsonl cannot be reached: no data for 0 s" in line
    assert "HTTP 503" in line
    assert "the same command again" in line
    asked = [path for _, path, _ in server.seen if path.endswith("train.jsonl")]
    assert len(asked) > 2


def test_a_changed_file_is_named(hub):
    lines = '{"text": "x"}\n' * 5
    (hub.folder / "data/train.jsonl").write_text(lines)
    change = f"""
import pathlib, sys
from tasks.reading import sources
from tasks.terminal.command_line import run
def main(_):
    corpus = sources.resolve(sources.parse("hf:an/owner"))
    file = pathlib.Path({str(hub.folder / "data/train.jsonl")!r})
    file.write_text(file.read_text(){{change}})
    list(sources.read(corpus, corpus.pieces[0]))
run(main, [])
"""
    line = refused(hub("-c", change.replace("{change}", ' + "more"'), token=TOKEN))
    assert "data/train.jsonl has changed" in line
    assert "it had 70 bytes and now has 74" in line
    (hub.folder / "data/train.jsonl").write_text(lines)
    line = refused(hub("-c", change.replace("{change}", '.replace("x", "y")'), token=TOKEN))
    assert "data/train.jsonl has changed" in line
    assert "etag" in line


def test_a_broken_file_ends_the_retries_of_others(hub):
    table = pa.table({"text": ["one"]})
    for number in range(20):
        pq.write_table(table, hub.folder / f"data/train-{number:02}-of-20.parquet")
    (hub.folder / "data/train-00-of-20.parquet").write_bytes(b"x" * 2000)
    hub.server.failing = "data/train-0[1-9]"
    begun = time.monotonic()
    done = hub("-c", READ_PLAINLY, token=TOKEN, PALIMPSEST_RETRY_DELAY="30")
    assert "train-00-of-20.parquet cannot be read" in refused(done)
    assert time.monotonic() - begun < 20


# --- what a user may get wrong


def refused(done):
    """Returns the error message, the last line printed; the others report retries."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert TOKEN not in done.stderr
    assert "Traceback" not in done.stderr
    *retries, line = done.stderr.splitlines()
    assert all(", retrying in " in retry for retry in retries)
    return line


def train(tmp_path, corpus):
    return ("-m", "vocab.train", f"--corpus={corpus}", f"--output={tmp_path / 'out'}")


def test_without_access_one_line_says_what_to_do(hub, tmp_path):
    (hub.folder / "data/train.jsonl").write_text('{"text": "x"}\n')
    line = refused(hub(*train(tmp_path, "hf:an/owner")))
    assert "set HF_TOKEN" in line
    assert "--corpus=parquet:FILES" in line
    assert "set HF_TOKEN" in refused(hub(*train(tmp_path, "hf:an/owner"), token="hf_wrong"))
    line = refused(hub(*train(tmp_path, "hf:no/such"), token=TOKEN))
    assert "hf:no/such does not exist or cannot be accessed" in line
    assert not (tmp_path / "out").exists()


def test_a_gated_data_set_says_whether_a_token_or_access_is_missing(hub, tmp_path):
    (hub.folder / "data/train.jsonl").write_text('{"text": "x"}\n')
    hub.server.access = "gated"
    line = refused(hub(*train(tmp_path, "hf:an/owner")))
    assert "is gated: request access on its page, then set HF_TOKEN" in line
    line = refused(hub(*train(tmp_path, "hf:an/owner"), token="hf_other"))
    assert "is gated and your token's account has no access" in line


def test_a_worker_without_the_token_says_so(hub):
    (hub.folder / "data/train.jsonl").write_text('{"text": "x"}\n')
    code = """
import os
from tasks.reading import sources
from tasks.terminal.command_line import run
def main(_):
    corpus = sources.resolve(sources.parse("hf:an/owner"))
    os.environ["HF_TOKEN"] = ""
    list(sources.read(corpus, corpus.pieces[0]))
run(main, [])
"""
    line = refused(hub("-c", code, token=TOKEN))
    assert "data/train.jsonl may not be read (HTTP 401)" in line
    assert "HF_TOKEN" in line


def test_other_mistakes_are_one_line_too(hub, tmp_path):
    (hub.folder / "data/train.xml").write_text("<text>x</text>\n")

    def line(corpus):
        return refused(hub(*train(tmp_path, corpus), token=TOKEN))

    assert "holds xml files" in line("hf:an/owner")
    (hub.folder / "data/train.xml").rename(hub.folder / "data/train.jsonl")
    assert "has no revision nope" in line("hf:an/owner@nope")
    assert "'nope' not found" in line("hf:an/owner:nope")
    configs = "".join(
        f"- config_name: {name}\n  data_files: data/{name}.jsonl\n" for name in ("oscar", "wiki")
    )
    (hub.folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in ("oscar", "wiki"):
        (hub.folder / f"data/{name}.jsonl").write_text('{"text": "x"}\n')
    assert "name one as hf:an/owner:CONFIG, one of oscar, wiki" in line("hf:an/owner")


def test_offline_mode_is_named(hub, tmp_path):
    line = refused(hub(*train(tmp_path, "hf:an/owner"), token=TOKEN, HF_HUB_OFFLINE="1"))
    assert "hf:an/owner cannot be read while HF_HUB_OFFLINE is set: unset it" in line


def test_an_unreachable_hub_is_soon_one_line(hub, tmp_path):
    arguments = train(tmp_path, "hf:an/owner")
    done = hub(*arguments, endpoint="http://127.0.0.1:9", PALIMPSEST_RETRY_SECONDS="1")
    assert "cannot be reached" in refused(done)
