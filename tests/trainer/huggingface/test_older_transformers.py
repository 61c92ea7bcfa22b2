"""Shapes in transformers 4.57: our folders load there, and its folders load here."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tasks.vocabulary import SpecialIds
from tests.trainer.huggingface.conftest import random_batch, random_params
from tests.trainer.huggingface.random_shapes import SHAPES, Theirs
from trainer.huggingface import configs, load, model_config, names, parity, weights

# Newer than 4.57; and a ModernBERT whose first layer is local.
MISSING = ("t5gemma2", "modernbert, biases")
PACKAGES = ("transformers==4.57.3", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
USED = """
import json, sys
import numpy as np, torch, transformers

assert transformers.__version__.startswith("4.")
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    print(folder, file=sys.stderr)
    kind = json.load(open(f"{folder}/config.json"))["architectures"][0]
    loader = getattr(transformers, kind)
    model, found = loader.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"], (folder, found)
    batch = {name: torch.from_numpy(each) for name, each in np.load(f"{folder}/batch.npz").items()}
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    np.save(f"{folder}/logits.npy", logits.numpy())
    model.save_pretrained(f"{folder}/again")
"""


def older_model(config):
    """Returns the model that transformers 4.57 makes of a config.json.

    The encoder of its T5Gemma sees a token less on either side than transformers 5's.
    """
    reach = getattr(config.part("attention_window").options, "reach", None)
    if reach is None:
        return config
    window = config.attention_window.replace(f"reach={reach}", f"reach={reach - 1}")
    return replace(config, attention_window=window)


def inputs_of(batch, model):
    """Returns the arguments of a model of transformers."""
    if not model.has_decoder:
        ids = batch["encoder_input_tokens"]
        return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
    own = batch["decoder_input_tokens"]
    if not model.has_encoder:
        return {"input_ids": own, "attention_mask": np.ones_like(own)}
    sources = batch["encoder_input_tokens"]
    return {
        "input_ids": sources,
        "attention_mask": (sources > 0).astype(np.int64),
        "decoder_input_ids": own,
        "decoder_attention_mask": np.ones_like(own),
    }


@pytest.mark.slow
def test_shapes_in_transformers_4(tmp_path):
    """Installs transformers 4.57 into a temporary folder, so it needs a package index."""
    older = tmp_path / "older"
    install = ("-m", "pip", "install", "-q", "--no-deps", f"--target={older}", *PACKAGES)
    subprocess.run([sys.executable, *install], check=True)
    made = {}
    for name in SHAPES:
        if name.startswith(MISSING):
            continue
        theirs = Theirs(name, tmp_path / "newer" / name.replace(", ", "_"))
        folder = tmp_path / name.replace(", ", "_").replace(" ", "_")
        folder.mkdir()
        config, params = theirs.config, theirs.params
        if name in ("longt5", "longt5, blocks"):  # 4.57 scales all tied logits
            config = replace(config, tied_logits=False, logits_scale=None)
            params = random_params(config)
        written = configs.to_config(config, 64, special=SpecialIds(pad=theirs.pad))
        (folder / "config.json").write_text(json.dumps(written))
        kind, pad = written["model_type"], written["pad_token_id"]
        weights.write(str(folder), names.to_tensors(params, config, kind, pad), 10**9)
        batch = random_batch(config)
        if "decoder_target_tokens" in batch:
            batch["decoder_target_tokens"] = np.ones_like(batch["decoder_target_tokens"])
        np.savez(folder / "batch.npz", **inputs_of(batch, config))
        made[folder] = config, params, batch
    environment = {**os.environ, "PYTHONPATH": str(older), "USE_TF": "0"}
    used = subprocess.run(
        [sys.executable, "-c", USED, *map(str, made)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr[-2000:]
    for folder, (config, params, batch) in made.items():
        theirs = np.load(folder / "logits.npy")
        ours = parity.our_logits(older_model(config), params)
        found = parity.compare(ours, lambda _, t=theirs: [t], [batch])
        assert found.holds, (folder.name, str(found))
        again = str(folder / "again")
        assert configs.same_model(model_config(again), config), folder.name
        there = parity.our_logits(older_model(config), load(again, config))
        found = parity.compare(there, lambda _, t=theirs: [t], [batch])
        assert found.holds, (folder.name, str(found))
