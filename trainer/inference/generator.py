"""A run's checkpoint as a function from texts to texts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.terminal.texts import checked
from tasks.vocabulary import encode_with_sentinels
from trainer.data.prompts import prompt_form
from trainer.decoding.decoder import Decoded, Decoder, Decoding
from trainer.engine.sharding import make_mesh
from trainer.inference import text, trained_run


class Generator:
    """Generates text after prompts with a checkpoint of a run.

    The `prefix` of `decoding` is set as in training. `step` None is the newest, `vocabulary` None
    the cache's; `cache_dir` is the folder of the tasks' caches, if moved; `average` chooses an
    average, "last:K". Outputs end at the piece `end`, by default at EOS. `modes` are
    pieces that start inputs in training, such as UL2's.
    """

    def __init__(
        self,
        model_dir: str,
        decoding: Decoding,
        step: int | None = None,
        cache_dir: str | None = None,
        vocabulary: str | None = None,
        average: str | None = None,
        end: str | None = None,
    ):
        run = trained_run.open_run(model_dir, cache_dir)
        self._form = prompt_form(run)
        self.modes = {piece for cached in run.data.tasks for piece in cached.task.objective.pieces}
        decoding = replace(decoding, prefix=decoding.prefix or self._form.prefix)
        self.vocabulary = trained_run.vocabulary_of(run, vocabulary)
        if end and (token := self.vocabulary.ids.find(end)) is not None:
            decoding = replace(decoding, eos_id=token)
        model, mesh, special = run.config.model, run.config.mesh, self.vocabulary.special
        self.decoder = Decoder(model, decoding, make_mesh(mesh), mesh.rules, special)
        self.step, self._params = trained_run.restore(run, step, self.vocabulary, average)

    def ids(self, prompt: str) -> np.ndarray:
        """Returns a prompt's ids as in training.

        Raises UserError for a missing sentinel, or half a character.
        """
        ids = encode_with_sentinels(self.vocabulary, checked(prompt, "the prompt"))
        return np.append(ids, np.int32(self.vocabulary.special.eos)) if self._form.ends else ids

    def __call__(
        self, prompts: Sequence[np.ndarray], example_ids: Sequence[int] | None = None
    ) -> list[Decoded]:
        """Calls the decoder with prompts from `ids`; see `Decoder.__call__`."""
        return self.decoder(self._params, prompts, example_ids)

    def text(self, ids: np.ndarray) -> str:
        """Returns the text of generated ids, with sentinels as <extra_id_k>."""
        return text.decode(self.vocabulary, ids)
