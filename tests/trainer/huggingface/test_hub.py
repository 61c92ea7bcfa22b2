"""Tests uploads to a local Hub: branches by step, mistakes in one line, and a lost connection."""

import dataclasses
import json
import os

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from tests.support.runs import command
from tests.support.servers.hub_uploads import TOKEN, HubUploadServer
from trainer import convert
from trainer.config.presets import model_preset
from trainer.conversion.sources import tree_of
from trainer.huggingface import configs, hub, names, weights
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

# huggingface_hub's own use of httpx.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
FOLDERS = ("checkpoint_1000", "checkpoint_2000")


@pytest.fixture
def server(monkeypatch):
    with HubUploadServer() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def write(folder, seed=0, **more):
    """Writes a folder with a small and a large file, and returns what it holds."""
    folder.mkdir(exist_ok=True)
    files = {"config.json": b"{}", "model.safetensors": bytes(2000) + bytes([seed]), **more}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def test_steps_are_branches_and_main_is_the_last(server, tmp_path):
    first = write(tmp_path / "a", 1, **{"model-00001-of-00002.safetensors": bytes(1500)})
    second = write(tmp_path / "b", 2)
    url = hub.push(f"{tmp_path}/a", "an/owner", 1000, "Step 1,000 of tiny", "task: prose")
    assert url == f"{server.url}/an/owner/tree/step_1000"
    hub.push(f"{tmp_path}/b", "an/owner", 2000, "Step 2,000 of tiny", "task: prose")
    branches = server.branches["an/owner"]
    assert branches == {"main": second, "step_1000": first, "step_2000": second}
    assert server.commits[0] == ("an/owner", "step_1000", "Step 1,000 of tiny", "task: prose")
    assert [commit[1] for commit in server.commits] == ["step_1000", "main", "step_2000", "main"]
    hub.push(f"{tmp_path}/a", "an/owner", 1000, "again", "", main=False)
    assert server.puts == 3  # of what is there already, nothing is sent again
    assert branches["main"] == second


NO_NAME = "is not a repository name: use OWNER/NAME"


@pytest.mark.parametrize(
    ("repository", "token", "message"),
    [
        ("an/owner", None, "needs a write token: set HF_TOKEN"),
        *((name, TOKEN, NO_NAME) for name in ("owner", "an/own er", "an/owner/x")),
    ],
)
def test_mistakes_are_found_before_any_work(
    server, tmp_path, monkeypatch, repository, token, message
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    flags = [f"--from={tmp_path}", f"--to={tmp_path}/x", f"--push_to={repository}"]
    with pytest.raises(UserError, match=message) as error:
        convert.main([*flags, "--format=huggingface"])
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="--push_to has no effect on --format=t5x"):
        convert.main([*flags, "--format=t5x"])


def test_refusals_are_one_line(server, tmp_path, monkeypatch):
    write(tmp_path / "a")
    for token, owner, says in (
        (TOKEN, "other/owner", "has no permission to write there"),
        ("hf_of_nobody", "an/owner", "the token is not valid"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=says) as error:
            hub.push(f"{tmp_path}/a", owner, 1, "message", "")
        assert "\n" not in str(error.value)
    assert server.branches == {}


def test_a_lost_connection_is_one_line_and_a_rerun_completes(server, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the library's retries
    files = {f"model-{n}.safetensors": np.random.default_rng(n).bytes(3000) for n in range(4)}
    held = write(tmp_path / "a", **files)
    server.drop_after = 2
    with pytest.raises(UserError, match=r"connection to the Hub was lost .*run the same comm") as e:
        hub.push(f"{tmp_path}/a", "an/owner", 1, "message", "")
    assert "\n" not in str(e.value)
    assert server.branches["an/owner"] == {"main": {}, "step_1": {}}
    kept = len(server.stored)
    assert kept == 2
    server.drop_after, server.puts = None, 0
    hub.push(f"{tmp_path}/a", "an/owner", 1, "message", "")
    assert server.branches["an/owner"] == {"main": held, "step_1": held}
    assert server.puts == 5 - kept


def test_the_command_uploads_a_folder_of_checkpoints(tmp_path):
    """A process of its own, since huggingface_hub reads its environment when it is imported."""
    model = dataclasses.replace(model_preset("t5_1_1_tiny"), vocab_size=128)
    facts = parameter_facts(model_spec(model)).items()
    drawn = np.random.default_rng(1)  # not ones: logits that are all equal compare nothing
    tree = tree_of({name: drawn.normal(size=each.shape).astype("f4") for name, each in facts})
    for name in FOLDERS:
        folder = tmp_path / "in" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(configs.to_config(model, 64)))
        weights.write(str(folder), names.to_tensors(tree, model, "t5"), 10**9)
    with HubUploadServer() as server:
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        flags = (f"--from={tmp_path}/in", f"--to={tmp_path}/out", "--format=huggingface")
        arguments = command("trainer.convert", *flags, "--dtype=bfloat16", "--push_to=an/owner")
        done = completed(arguments, env=os.environ | environment)
        assert done.returncode == 0, done.stderr
        assert f"uploaded to {server.url}/an/owner/tree/step_2000" in done.stdout
        branches = server.branches["an/owner"]
        assert branches["main"] == branches["step_2000"]
        for name, branch in zip(FOLDERS, ("step_1000", "step_2000"), strict=True):
            held = {path.name: path.read_bytes() for path in (tmp_path / "out" / name).iterdir()}
            assert branches[branch] == held
        assert server.commits[0][2] == "Step 1,000, converted from checkpoint_1000"
        assert "bit for bit" in server.commits[0][3]
