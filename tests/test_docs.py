"""Checks the documents: flags and links exist, and scripts do what the documents say."""

import functools
import importlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import time

import pytest

from palimpsest.__main__ import named
from palimpsest.annexes.recipes import from_corpus
from palimpsest.commands import COMMANDS
from pipeline.runners import engines
from tasks import annexes
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import flags_of, parse, refuse_unknown
from tests.support import in_process, parents
from tests.support.processes import completed
from trainer.config.from_flags import RunFlags, build_config

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES]
# Scripts that run a module with the flags they are given.
WRAPPERS = {"scripts/tpu_pod.sh start": "trainer.pretrain"}


def commands(document):
    """Returns (module, flags) of every command in the indented blocks of a document."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    found = []
    for line in re.findall(r"^    (.+)$", text, re.MULTILINE):
        if "…" in line or "# at commit" in line:
            continue
        if line.startswith("palimpsest "):
            name, flags = named(shlex.split(line, comments=True)[1:])
            found.append((COMMANDS[name], [word for word in flags if word.startswith("--")]))
            continue
        match = re.search(
            r"(?:python -m ([a-z_]+\.[a-z0-9_]+)|(scripts/tpu_pod\.sh start))(.*)", line
        )
        if match:
            given = shlex.split(match[3], comments=True)
            # A sweep's file, named without dashes, has flags of its own.
            bare = match[1] == "experiments.sweep"
            flags = [word for word in given if bare or word.startswith("--")]
            found.append((match[1] or WRAPPERS[match[2]], flags))
    return found


def refused(module, words):
    """Returns why a module refuses flags; "" if it does not."""
    if module == "experiments.sweep":
        from experiments import sweep
        from experiments.sweeps import cells

        # Commands before it make the folder that its runs start from.
        words = [re.sub("^--parent=.*", f"--parent={parents.decoder()}", word) for word in words]
        words = [re.sub("^--model=.*", f"--model={parents.run()}", word) for word in words]
        cells.plan(sweep.defined(words), "/somewhere")
        return ""
    if module.startswith("benchmarks") or module.startswith("tests"):
        known = set(re.findall(r"--[a-z_]+", help_of(module)))
        unknown = {word.split("=")[0] for word in words} - known
        return ", ".join(unknown)
    if module == "trainer.pretrain" and any(word.startswith("--corpus=") for word in words):
        of_build, of_run = from_corpus.split(words)
        return refused("pipeline.build", of_build) or refused(module, of_run)
    kind = importlib.import_module(module).main.flags
    try:
        given = parse(kind, words)
        if "runner_flags" in given.values:
            engines.refuse_unknown(
                given.values["runner_flags"], [each.name for each in flags_of(kind)]
            )
        if issubclass(kind, RunFlags) and "gin.gin_file" not in given.values:
            known = {name for flag in flags_of(kind) for name in flag.names}
            refuse_unknown(given.values.get("others", ()), known)
            run = given.below("run")
            preset = run.values.pop("preset", "t5_1_1_tiny")
            build_config(preset, run, given.values.get("optimizer_preset"))
    except UserError as error:
        # An example may leave out what the one before it shows.
        return "" if str(error).startswith("required: ") else str(error)
    return ""


@functools.cache
def help_of(module):
    return in_process.run(module, "--help").stdout


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if commands(name)])
def test_every_flag_in_a_document_exists(document):
    for module, flags in commands(document):
        assert refused(module, flags) == "", (module, flags)


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, "dev/LOG.md"])
def test_every_link_in_a_document_leads_to_a_file_or_heading(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)$", text, re.MULTILINE)
    for target in (one or other for one, other in targets):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_navigation_of_the_site():
    found = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in found) == PAGES


def test_the_api_page_has_every_public_module():
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    for package in ("pipeline", "tasks", "trainer", "vocab"):
        of_core = [name for name in shown if ".annexes." not in name]
        rooms = {name.split(".")[1] for name in of_core if name.startswith(package)}
        assert rooms == set(importlib.import_module(package).__all__)
    for name in shown:
        path = ROOT / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert "__all__ = [" in path.read_text(), name


def test_the_table_of_the_design_has_every_annex():
    text = (ROOT / "docs" / "design.md").read_text().partition("| package | annexes |")[2]
    found: dict[str, set[str]] = {}
    for package, names in re.findall(r"^\| `(\w+)`.*? \| (.*) \|$", text, re.MULTILINE):
        found.setdefault(package, set()).update(re.findall(r"`(\w+)`", names))
    for annex in annexes.annexes():
        package = annex.package.partition(".")[0]
        assert annex.name in found[package], f"{annex.package} is not in docs/design.md"
        found[package].remove(annex.name)
    assert not any(found.values()), found


def test_the_documents_have_commands():
    modules = {module for module, _ in commands("docs/tpu.md")}
    assert {"vocab.train", "pipeline.build", "trainer.pretrain", "trainer.evaluate"} <= modules
    assert "--no_such" in refused("pipeline.build", ["--no_such=1"])


def fake(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def on_a_slice(tmp_path, *arguments, **environment):
    """Runs tpu_pod.sh; returns the lines that the commands on the hosts show."""
    # gcloud that is four machines; systemd-run and docker that show what they are to run.
    fake(tmp_path, "gcloud", 'for word; do case $word in --command=*) command=${word#*=};; '
         '--worker=0) hosts=1;; --worker=all) hosts=4;; esac; done\n'
         'for ((host = 0; host < hosts; host++)); do bash -c "$command"; done')  # fmt: skip
    fake(tmp_path, "sudo", 'exec "$@"')
    fake(tmp_path, "systemd-run", 'while [[ $1 == --* ]]; do case $1 in --setenv=*) '
         'printf "<%s>" "${1#*=}";; esac; shift; done; printf "<%s>" "$@"; echo')  # fmt: skip
    fake(tmp_path, "docker", 'printf "<%s>" "$@"; echo')
    done = completed(
        ["scripts/tpu_pod.sh", *arguments],
        env=os.environ
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/me"}
        | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(*words):
    return "".join(f"<{word}>" for word in words)


SCHEDULE = "--optimizer.schedule=constant * rsqrt_decay"
START = ["start", "pretrain", "a-zone", "--preset=t5_1_1_tiny", SCHEDULE]
STARTED = ["trainer.pretrain", "--preset=t5_1_1_tiny", SCHEDULE, "--processes.coordinator=auto"]
COMPILER = "--xla_one=true --xla_two=true"


def test_every_host_of_a_slice_gets_the_same_command(tmp_path):
    python = ["/home/me/palimpsest/.venv/bin/python", "-m"]
    assert on_a_slice(tmp_path, *START) == [shown("LIBTPU_INIT_ARGS=", *python, *STARTED)] * 4
    with_flags = on_a_slice(tmp_path, *START, LIBTPU_INIT_ARGS=COMPILER)
    assert with_flags == [shown(f"LIBTPU_INIT_ARGS={COMPILER}", *python, *STARTED)] * 4
    usage = completed(["scripts/tpu_pod.sh"])
    assert usage.returncode == 2
    assert "scripts/tpu_pod.sh start" in usage.stderr
    assert "LIBTPU_INIT_ARGS" in usage.stderr


def test_every_host_of_a_slice_runs_the_same_image(tmp_path):
    image = {"IMAGE": "host/project/trainer:1", "LIBTPU_INIT_ARGS": COMPILER}
    assert on_a_slice(tmp_path, *START, **image) == [
        shown("/usr/bin/docker", "run", "--name=palimpsest", "--rm", "--privileged", "--net=host",
              "--user=root", "--volume=/tmp:/tmp",
              "--env=JAX_COMPILATION_CACHE_DIR=/tmp/palimpsest-xla",
              f"--env=LIBTPU_INIT_ARGS={COMPILER}", image["IMAGE"], *STARTED)
    ] * 4  # fmt: skip
    pulled = on_a_slice(tmp_path, "install", "pretrain", "a-zone", **image)
    assert pulled == [shown("pull", "--quiet", image["IMAGE"])] * 4


@pytest.mark.parametrize(
    ("codes", "runs", "end"),
    [([0], 1, 0), ([75, 76, 137, 0], 4, 0), ([76, 2], 2, 2), ([1], 1, 1), ([75] * 9, 4, 75)],
)
def test_a_run_is_started_again_after_what_may_pass(tmp_path, codes, runs, end):
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    fake(tmp_path, "run", f'echo >> {tmp_path}/runs; code=$(head -n 1 {tmp_path}/codes)\n'
         f'sed -i 1d {tmp_path}/codes; [ $code = 137 ] && kill -KILL $$; exit $code')  # fmt: skip
    done = subprocess.run(
        ["scripts/until_done.sh", tmp_path / "run"],
        cwd=ROOT, env=os.environ | {"PAUSE": "0", "RESTARTS": "3"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == end
    assert len((tmp_path / "runs").read_text()) == runs


def test_sigterm_goes_on_to_the_run_and_ends_it(tmp_path):
    fake(tmp_path, "run", f'trap "echo told >> {tmp_path}/told; exit 75" TERM\n'
         f'touch {tmp_path}/there; while true; do sleep 0.05; done')  # fmt: skip
    loop = subprocess.Popen(
        ["scripts/until_done.sh", tmp_path / "run"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "there").exists():
        time.sleep(0.02)
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(timeout=30) == 75
    assert (tmp_path / "told").read_text() == "told\n"
