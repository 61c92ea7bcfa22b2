"""A missing package is one line with the extra that installs it."""

import json
import re
import sys
import tomllib

import pytest

from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tests.support.processes import ROOT, completed


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.DISTRIBUTION
    other_names = {"gin": "gin-config", "google": "apache-beam", "orbax": "orbax-checkpoint"}
    for package, extra in extras.EXTRAS.items():
        listed = [re.match(r"[\w-]+", each)[0] for each in project["optional-dependencies"][extra]]
        name = other_names.get(package, package.replace("_", "-"))
        brought = {("jaxlib", "trainer"), ("pandas", "pipeline")}  # by JAX and by datasets
        assert name in listed or (name, extra) in brought


def test_a_training_machine_has_the_compiler_of_the_loops_that_trainer_and_pipeline_share():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("pipeline", "trainer"):
        assert "numba>=0.63" in project["optional-dependencies"][extra]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "words", "package", "extra"),
    [
        ("trainer.evaluate", "--model_dir=none", "jax", "trainer"),
        ("pipeline.verify", "--cache=none", "pyarrow", "pipeline"),
        ("vocab.train", "--corpus=python_docs --output=v", "sentencepiece", "pipeline"),
        ("vocab.train", "--corpus=hf:a/b --output=v", "datasets", "pipeline"),
        ("trainer.generate", "--model_dir=none --prompt=a", "jaxlib", "trainer"),
    ],
)  # fmt: skip
def test_a_command_without_its_packages(module, words, package, extra, tmp_path):
    hidden = f"import sys; sys.modules[{package!r}] = None; import runpy; sys.argv[0] = 'x'; "
    code = hidden + f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = completed([sys.executable, "-c", code, *words.split()], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    advice = f"pip install --editable '{ROOT}[{extra}]'"
    assert done.stderr.endswith(f"needs the package {package}: {advice}\n")
    assert done.stderr.count("\n") == 1


WHEEL = "palimpsest_lm-0.2.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        (None, "'palimpsest-lm[gcp]'"),
        ({"url": f"file:///my%20own/{WHEEL}", "archive_info": {}}, f"'/my own/{WHEEL}[gcp]'"),
        ({"url": f"https://a.b/{WHEEL}", "archive_info": {}},
         f"'palimpsest-lm[gcp] @ https://a.b/{WHEEL}'"),
        ({"url": "https://a.b/c.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
         "'palimpsest-lm[gcp] @ git+https://a.b/c.git@1f'"),
    ],
)  # fmt: skip
def test_the_advice_names_what_was_installed(tmp_path, monkeypatch, origin, advice):
    (info := tmp_path / "palimpsest_lm-9.8.dist-info").mkdir()
    (info / "METADATA").write_text("Name: palimpsest-lm\nVersion: 9.8\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install("gcp") == f"pip install {advice}"
    assert extras.version() == "9.8"


def test_a_clone_is_installed_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert extras.install("gcp") == "pip install --editable '.[gcp]'"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras.version() == project["version"]


def test_other_missing_modules_are_bugs():
    with pytest.raises(ModuleNotFoundError), extras.named():
        import nowhere_to_be_found  # noqa: F401
    with pytest.raises(UserError, match="work cannot import"), extras.needed("work", "gcp"):
        raise ImportError("broken", name="library")
