"""Converted checkpoints on a local Hub: branches by step."""

import dataclasses
import json
import os

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from tests.support.runs import command
from tests.support.servers.hub_uploads import TOKEN, HubUploadServer
from trainer.annexes.conversion import convert
from trainer.config.presets import model_preset
from trainer.huggingface import configs, names, weights
from trainer.model.paths import tree_of
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

pytestmark = pytest.mark.processes

FOLDERS = ("checkpoint_1000", "checkpoint_2000")


def test_mistakes_are_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    flags = [f"--from={tmp_path}", f"--to={tmp_path}/x", "--push_to=owner"]
    with pytest.raises(UserError, match="is not a repository name: use OWNER/NAME"):
        convert.main([*flags, "--format=huggingface"])
    with pytest.raises(UserError, match="--push_to has no effect on --format=t5x"):
        convert.main([*flags, "--format=t5x"])


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
        arguments = command(
            "trainer.annexes.conversion.convert", *flags, "--dtype=bfloat16", "--push_to=an/owner"
        )
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
