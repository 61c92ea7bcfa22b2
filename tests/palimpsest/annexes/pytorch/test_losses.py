"""A few updates in transformers and in our trainer, from equal parameters, have equal losses."""

import itertools

import jax
import numpy as np
import pytest

import palimpsest
from tests.support.runs import TASK, run_of, updated
from trainer.engine.program import Program
from trainer.exporting import folder
from trainer.exporting.folder import Model, Settings
from trainer.huggingface import parity
from trainer.model.paths import named

pytestmark = pytest.mark.torch

PREFIX, LM = "python_docs_prefix_lm", "python_docs_autoregressive_lm"
PACKED = ("--data.pack_examples=true", "--data.example_inputs=20", "--data.example_targets=20")
OPTIMIZER = (
    *("--optimizer.name=adamw", "--optimizer.learning_rate=0.001", "--optimizer.weight_decay=0"),
    # A larger epsilon than the default's keeps Adam from magnifying errors of rounding.
    *("--optimizer.schedule=constant", "--optimizer.epsilon=1e-4", "--loss.z_loss=0"),
    "--loss.normalizer=num_real_target_tokens",
)
UPDATES = 5
# Preset, task, lengths and flags.
CASES = {
    "T5": ("t5_1_1_tiny", TASK, (64, 18), ()),
    "packed T5": ("t5_1_1_tiny", PREFIX, (64, 64), PACKED),
    "Llama": ("llama_tiny", LM, (None, 64), ()),
    "Llama by document": ("llama_tiny", LM, (None, 64), ("--data.segment_documents=true",)),
    "prefixes in Llama": ("llama_tiny", PREFIX, (32, 32), ()),
}


def exported(run, path):
    """Returns the model of transformers with a run's initial parameters."""
    params = jax.tree.map(np.asarray, Program(run).initial_state().params)
    path.mkdir()
    model, arrays = folder.for_transformers(run.config.model, named(params))
    written = folder.to_transformers(
        str(path), Model(model, run.config.preset, 64), arrays, Settings(vocabulary=None)
    )
    return parity.their_model(str(path), written)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_trainers(text_cache, tmp_path, case):
    import torch

    preset, task, lengths, flags = CASES[case]
    run = run_of(text_cache, *OPTIMIZER, *flags, task=task, lengths=lengths, preset=preset)
    _, ours = updated(Program(run), itertools.islice(run.data.training(0), UPDATES))
    model = exported(run, tmp_path / "model").train()
    # The rows of a decoder without BOS begin with the padding id, whose embedding is learned, too.
    model.get_input_embeddings().padding_idx = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, eps=1e-4, weight_decay=0)
    found = palimpsest.batches(config=run.data.config, cache_dir=text_cache)
    theirs = []
    for batch in itertools.islice(palimpsest.torch.DataLoader(found), UPDATES):
        loss = palimpsest.torch.seq2seq(model, batch).loss
        theirs.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
    assert abs(ours[0] - ours[-1]) > 5e-4
