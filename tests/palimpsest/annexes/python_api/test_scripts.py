"""Programs that use the commands from Python: a script, the page's blocks and the notebook."""

import re
import subprocess
import sys

import pytest

import palimpsest_home
from tests.support.processes import PYTHONPATH, ROOT, completed, started

# A script without a main guard: vocabularies and builds start child processes.
SCRIPT = """
import os, signal, sys, threading, time
import palimpsest
print("begun")
corpus = palimpsest.write_corpus([f"a line about {n} boats" for n in range(400)], "corpus.jsonl")
size = {"vocab_size": 40, "workers": 2}
vocabulary = palimpsest.train_vocabulary(corpus=corpus, output="vocabulary", **size)
how = {"task": "span_corruption", "cache_dir": "cache", "workers": 2, "shard_bytes": 4000}
def build(name):
    return palimpsest.build(corpus=corpus, vocabulary=vocabulary, name=name, **how)
cache = build("a")
thread = threading.Thread(target=build, args=["b"])
thread.start()
thread.join()
other = palimpsest.Cache("cache", "b_span_corruption")
assert other.counts().rows.sum() == cache.counts().rows.sum()
"""
INTERRUPTED = """
run = dict(preset="t5_1_1_tiny", task=cache.task, cache_dir=cache, model_dir="model", batch_size=4,
           lengths={"inputs": 32, "targets": 16}, **{"metrics.every_steps": 1})
def interrupt():
    while not os.path.exists("model/metrics.jsonl") or not os.path.getsize("model/metrics.jsonl"):
        time.sleep(0.01)
    # Python drops a KeyboardInterrupt that is raised in a callback of the garbage collector.
    while not any(name.startswith("checkpoint_") for name in os.listdir("model")):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
threading.Thread(target=interrupt, daemon=True).start()
try:
    palimpsest.pretrain(**run, train_steps=100000)
except KeyboardInterrupt:
    (saved,) = (int(name[11:]) for name in os.listdir("model") if name.startswith("checkpoint_"))
assert 0 < saved < 100000
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
model = palimpsest.pretrain(**run, train_steps=saved + 2)
assert [*model.metrics().index] == [*range(1, saved + 3)]
build("c")  # with JAX in the process
def terminate():
    while not os.path.exists(f"model/checkpoint_{saved + 4}"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=terminate).start()
print("ended")
run |= {"checkpoint.every_steps": 2, "checkpoint.keep": None}
palimpsest.pretrain(**run, train_steps=100000)
print("begun again")
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_script_without_a_main_guard(tmp_path, way, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    text, ends, code = SCRIPT, ["begun"], 0
    if way == "file":
        text, ends, code = SCRIPT + INTERRUPTED, ["begun", "ended"], 75
    (tmp_path / "script.py").write_text(text)
    with (tmp_path / "script.py").open() as file:
        done = completed(
            [sys.executable, *(["script.py"] if way == "file" else ["-"])],
            cwd=tmp_path, stdin=file if way == "stdin" else subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("begun", "ended", "begun again")] == ends


@pytest.mark.processes
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/api.md").read_text()
    section = page[page.index("## From Python") : page.index("::: palimpsest.")]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    said = capsys.readouterr().out
    assert "--train_steps=0: it must be 1 to 2**31 - 1" in said
    assert "OptimizerConfig(name='adafactor', learning_rate=0.003" in said
    assert (tmp_path / "report.html").exists()
    assert re.search(r"^Return a .+ of the string\.$", said, re.MULTILINE)


@pytest.mark.notebook
@pytest.mark.processes
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    path = ROOT / "docs/notebook.ipynb"
    assert path.stat().st_size < 100_000
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    bars = [
        text
        for each in outputs
        if each.output_type == "display_data"
        if (text := each.data["text/plain"]).partition(" ")[0] in ("training", "building")
    ]
    assert len(bars) == 3  # of the vocabulary, the cache and the run, not one for each evaluation
    assert re.match(r"training +━{24} +100% +500/500 +in \d+:\d\d\n  loss \d", bars[-1])
    assert len(outputs) < 40


@pytest.mark.processes
def test_workers_that_are_no_forks_find_ours(tmp_path):
    for name in palimpsest_home.PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was run')\n")
    (tmp_path / "a.txt").write_text("A line of text.\n" * 1000)
    code = (
        f"import sys; sys.path[0] = {str(ROOT)!r}; import palimpsest, threading; sys.path[0] = ''\n"
        "flags = dict(task='lm', name='mine', vocabulary='bytes', workers=2, shard_bytes=4000)\n"
        "call = lambda: print(palimpsest.build(corpus='text:a.txt', cache_dir='cache', **flags))\n"
        "thread = threading.Thread(target=call); thread.start(); thread.join()\n"
    )
    done = started("-c", code, cwd=tmp_path)
    assert done.stdout.endswith("Cache('cache', 'mine_lm')\n"), done.stderr
