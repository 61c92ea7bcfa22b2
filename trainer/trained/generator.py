"""A run's checkpoint as a function from texts to texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trainer.data.cached import CachedData
from trainer.data.prepared import Run
from trainer.decoding.decoder import Decoded, Decoder, Decoding
from trainer.engine.sharding import make_mesh
from trainer.trained import text, trained_run


class PromptForm(NamedTuple):
    """The form of prompts in training.

    Attributes:
      ends: EOS ends them.
      prefix: their tokens see one another, in a decoder-only model.
    """

    ends: bool
    prefix: bool


def prompt_form(run: Run) -> PromptForm:
    """Returns the form of a run's prompts: that of inputs, if its tasks have any."""
    decoder_only = run.config.model.architecture == "decoder"
    if not decoder_only or run.lengths.inputs:
        return PromptForm(ends=True, prefix=decoder_only)
    if not isinstance(run.data, CachedData):
        return PromptForm(ends=False, prefix=False)
    objectives = [each.task.objective for each in run.data.tasks]
    return PromptForm(ends=False, prefix=any("prefix" in each.features for each in objectives))


class Generator:
    """Generates text after prompts by a checkpoint of a run.

    Args:
      model_dir: folder of the run.
      decoding: the choices; `prefix` is set as in training.
      step: step of the checkpoint; the newest if None.
      cache_dir: folder of caches by task, if they were moved after training.
      vocabulary: as `tasks.vocabulary.load` takes it; the cache's if None.

    Attributes:
      step: step of the checkpoint.
      decoder: the decoder.
      vocabulary: the vocabulary.
      modes: pieces with which inputs begin in training, such as UL2's.

    Raises:
      UserError: run, checkpoint or vocabulary does not exist, or the model has no decoder.
    """

    def __init__(
        self,
        model_dir: str,
        decoding: Decoding,
        step: int | None = None,
        cache_dir: str | None = None,
        vocabulary: str | None = None,
    ):
        run = trained_run.open_run(model_dir, cache_dir)
        self._form = prompt_form(run)
        tasks = run.data.tasks if isinstance(run.data, CachedData) else []
        self.modes = {piece for each in tasks for piece in each.task.objective.pieces}
        decoding = replace(decoding, prefix=decoding.prefix or self._form.prefix)
        config = run.config
        mesh = make_mesh(config.mesh)
        self.vocabulary = trained_run.vocabulary_of(run, vocabulary)
        special = self.vocabulary.special
        self.decoder = Decoder(config.model, decoding, mesh, config.mesh.rules, special)
        self.step, self._params = trained_run.restore(run, step, self.vocabulary)

    def ids(self, prompt: str) -> np.ndarray:
        """Returns a prompt's ids as the model saw them in training.

        Raises:
          UserError: the prompt names a sentinel that there is not.
        """
        ids = text.encode(self.vocabulary, prompt)
        return np.append(ids, np.int32(self.vocabulary.special.eos)) if self._form.ends else ids

    def __call__(
        self, prompts: Sequence[np.ndarray], example_ids: Sequence[int] | None = None
    ) -> list[Decoded]:
        """Returns what `Decoder.__call__` does, for prompts of `ids`."""
        return self.decoder(self._params, prompts, example_ids)

    def text(self, ids: np.ndarray) -> str:
        """Returns the text of generated ids, with sentinels as <extra_id_k>."""
        return text.decode(self.vocabulary, ids)
