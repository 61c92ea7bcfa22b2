"""A run as a model of lm-evaluation-harness, registered under the name "palimpsest".

Dimensions: B rows of a batch, L positions.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tasks import registry
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rejected
from tasks.vocabulary import encode_with_sentinels, sentinel_piece
from trainer.config.decoding import GREEDY, SAMPLE, SPAN, TARGETS, Decoding
from trainer.data.batches import pad_rows
from trainer.data.features import Batch
from trainer.data.prompts import prompt_form
from trainer.data.run import Run
from trainer.decoding.decoder import Decoder, bucket
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.evaluating.likelihood import of_targets
from trainer.inference import text, trained_run

# Default number of new tokens, as in lm_eval's `hf`.
_NEW_TOKENS = 256
# Settings of generation beside `until`, `max_gen_toks` and `do_sample`.
_SAMPLING = ("temperature", "top_k", "top_p")


class _Row(NamedTuple):
    """The encoder's input, the decoder's input and last target, and the number of targets."""

    inputs: list[int]
    tokens: list[int]
    scored: int


@register_model("palimpsest")
class Palimpsest(TemplateLM):
    """Scores and generates with a checkpoint of a run, as lm_eval's `hf` does with its export.

    A model that reads inputs gets the context as inputs. In the form "targets", the targets are the
    continuation; in "span", the context ends in <extra_id_0> unless it has one, and the targets
    are <extra_id_0>, which is not scored, and the continuation. A language model, which has no
    form, continues the context. `form` None is that of the run's tasks. `max_length` limits the
    tokens of each side, which are cut from the left; None is the longest row of training.

    Differences: the text of a rolling likelihood is without BOS, which `hf` scores unless it gets
    `add_bos_token=False`; a context that is cut before generation keeps the start id.
    """

    def __init__(
        self,
        model_dir: str,
        step: int | None = None,
        average: str | None = None,
        vocabulary: str | None = None,
        cache_dir: str | None = None,
        task_module: str | None = None,
        form: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 32,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if task_module:
            registry.load(task_module)
        run = trained_run.open_run(model_dir, cache_dir)
        model = self._model = run.config.model
        if not model.has_decoder:
            raise UserError(
                f"family {model.family} has no decoder: it predicts masked tokens in place and "
                "gives no likelihood of a continuation"
            )
        self._vocabulary = trained_run.vocabulary_of(run, vocabulary)
        self._reads = prompt_form(run)
        self._encodes = model.has_encoder
        # lm_eval's names for a context that is encoded with its continuation, or alone.
        self.backend = "seq2seq" if self._reads.ends else "causal"
        self._spans = _form(run, form, self._reads.ends) == SPAN
        gap = sentinel_piece(0) if self._spans else ""
        self._gap = encode_with_sentinels(self._vocabulary, gap).tolist()
        self._special = self._vocabulary.special.starting(model.start_id)
        self.max_length = _max_length(run, max_length)
        self._program = Program(run)
        parts = self._program.mesh.size
        self._batch_size = -(-int(batch_size) // parts) * parts
        self._of_targets = of_targets(self._program)
        _, self._params = trained_run.restore(run, step, self._vocabulary, average)

    @property
    def eot_token_id(self) -> int:
        return self._special.eos

    @property
    def prefix_token_id(self) -> int:
        return self._special.eos if self._reads.ends else self._special.start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids = encode_with_sentinels(self._vocabulary, string).tolist()
        if add_special_tokens is False:
            return ids
        return [*ids, self._special.eos] if self._reads.ends else [self._special.start, *ids]

    def _prompt(self, context: list[int]) -> list[int]:
        """Returns the ids of a context; spans need a gap, its own or one at its end."""
        if self._spans and self._gap[0] not in context:
            eos = self._special.eos
            words = context[:-1] if context[-1] == eos else context
            context = [*words, *self._gap, eos]
        return context[-self.max_length :]

    def _row(self, context: list[int], continuation: list[int]) -> _Row:
        most = self.max_length - len(self._gap)
        if len(continuation) > most:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, but the model reads at most "
                f"{most}: set --max_length"
            )
        context = self._prompt(context)
        begin = [self._special.start] if self._reads.ends else []
        given = begin if self._encodes else [*begin, *context]
        tokens = [*given, *self._gap, *continuation][-self.max_length - 1 :]
        return _Row(context if self._encodes else [], tokens, len(continuation))

    def _batch(self, rows: Sequence[_Row]) -> Batch:
        """Returns rows as int32 [B, L] features, padded with 0."""
        most = self._model.longest_text
        length = bucket(max(len(row.tokens) for row in rows) - 1, most)
        tokens_BL = _padded([row.tokens for row in rows], length + 1)
        ends_B1 = np.array([[len(row.tokens) - 1] for row in rows])
        begins_B1 = ends_B1 - np.array([[row.scored] for row in rows])
        place_L = np.arange(length)
        batch = {
            "decoder_input_tokens": tokens_BL[:, :-1],
            "decoder_target_tokens": tokens_BL[:, 1:],
            "decoder_loss_weights": (begins_B1 <= place_L) & (place_L < ends_B1),
        }
        marked = {"decoder_segment_ids": place_L < ends_B1}
        if self._reads.prefix:
            batch["decoder_causal_attention"] = place_L <= begins_B1 - len(self._gap)
        if self._encodes:
            longest = max(len(row.inputs) for row in rows)
            inputs_BL = _padded([row.inputs for row in rows], bucket(longest, most))
            sizes_B1 = np.array([[len(row.inputs)] for row in rows])
            batch["encoder_input_tokens"] = inputs_BL
            marked["encoder_segment_ids"] = np.arange(inputs_BL.shape[1]) < sizes_B1
        if not self._special.zero_pads:
            batch |= marked
        return {name: array.astype(np.int32) for name, array in batch.items()}

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        # Rows of similar length share a batch, and lengths few programs.
        order = sorted(range(len(rows)), key=lambda place: [*map(len, rows[place][:2])])
        found: dict[int, tuple[float, bool]] = {}
        with progress.shown("scoring", len(rows)) as bar:
            for first in range(0, len(order), self._batch_size):
                places = order[first : first + self._batch_size]
                batch = pad_rows(self._batch([rows[each] for each in places]), self._batch_size)
                made = self._of_targets(self._params, put_batch(batch, self._program.mesh))
                log_B = np.asarray(made.log_BL, np.float64).sum(axis=1)
                greedy_BL = np.asarray(made.greedy_BL)
                for row, place in enumerate(places):
                    found[place] = float(log_B[row]), bool(greedy_BL[row].all())
                bar.update(first + len(places))
        return [found[place] for place in range(len(rows))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log likelihood of each text, cut into windows with a token of context each.

        EOS ends a text that is a model's whole targets.
        """
        windows = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], self._reads.ends and not self._spans)
            most = self.max_length - len(self._gap)
            cut = get_rolling_token_windows(ids, self.prefix_token_id, most, 1)
            windows += [(number, *make_disjoint_window(pair)) for pair in cut]
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows)
        for (number, *_), (log, _) in zip(windows, scored, strict=True):
            totals[number] += log
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(place)
        found: dict[int, str] = {}
        for settings, places in alike.items():
            until, decoding = self._decoding(json.loads(settings))
            program, special = self._program, self._vocabulary.special
            decoder = Decoder(self._model, decoding, program.mesh, program.rules, special)
            room = self.max_length - (0 if self._encodes else decoding.max_new_tokens)
            if room < 1:
                raise UserError(
                    f"a task asks for {decoding.max_new_tokens} new tokens, but the model's rows "
                    f"have {self.max_length}: set --gen_kwargs=max_gen_toks=N or --max_length"
                )
            prompts = [self._generates(requests[place].args[0], room) for place in places]
            for place, made in zip(places, decoder(self._params, prompts, places), strict=True):
                found[place] = postprocess_generated_text(self._text(made.ids), until, None)
        return [found[place] for place in range(len(requests))]

    def _generates(self, context: str, room: int) -> np.ndarray:
        """Returns the decoder's prompt for a context, without the start id, in `room` tokens."""
        ids = self._prompt(self.tok_encode(context))
        if not self._reads.ends:
            ids, room = ids[1:], room - 1
        return np.array(ids[max(0, len(ids) - room) :], np.int32)

    def _decoding(self, settings: dict[str, Any]) -> tuple[list[str], Decoding]:
        """Returns the strings that end a text, and how to decode, from a task's settings."""
        try:
            settings = dict(normalize_gen_kwargs(settings, _NEW_TOKENS))
        except ValueError as error:
            raise UserError(f"generation_kwargs: {error}") from error
        until = handle_stop_sequences(settings.pop("until", None), None)
        new, samples = settings.pop("max_gen_toks"), settings.pop("do_sample", False)
        if not samples:  # as transformers, which warns of them
            settings = {name: value for name, value in settings.items() if name not in _SAMPLING}
        if unknown := settings.keys() - _SAMPLING:
            raise UserError(
                f"generation_kwargs: {', '.join(sorted(unknown))}: only until, max_gen_toks, "
                f"do_sample, {', '.join(_SAMPLING)} are known"
            )
        method = SAMPLE if samples else GREEDY
        size = self._batch_size
        try:
            made = Decoding(method=method, max_new_tokens=new, batch_size=size, **settings)
        except Rejected as error:
            raise UserError(f"generation_kwargs: {error}") from error
        return until, made

    def _text(self, ids: np.ndarray) -> str:
        """Returns the text of generated ids without special tokens, or that of the first span."""
        vocabulary = self._vocabulary
        some = text.span_ids(vocabulary.ids, ids).get(0, []) if self._spans else ids.tolist()
        special = dataclasses.asdict(self._special).values()
        kept = [each for each in some if each < vocabulary.first_sentinel and each not in special]
        return vocabulary.decode(np.array(kept, np.int32))


def _padded(rows: Sequence[list[int]], length: int) -> np.ndarray:
    return np.array([row + [0] * (length - len(row)) for row in rows], np.int32)


def _max_length(run: Run, given: int | None) -> int:
    """Returns the length of the longest row: `given`, else as in training."""
    model, lengths = run.config.model, run.lengths
    if most := model.longest_text:
        if given and given > most:
            raise UserError(f"--max_length={given}: the model has {most} positions for a text")
        return given or most
    sides = max if model.has_encoder else sum
    return given or sides((lengths.inputs, lengths.targets)) or model.max_positions


def _form(run: Run, given: str | None, reads_inputs: bool) -> str | None:
    """Returns `given`, else the form of the run's tasks; None for a language model."""
    if not reads_inputs:
        if given:
            raise UserError(
                f"--form={given} is for models that read inputs, but this one continues the "
                "context: leave it out"
            )
        return None
    data, spans = run.data, set[bool]()
    if data.tasks:
        used = [task.task for task in data.tasks]
        spans = {each.objective.sentinels(data.example_lengths(each)) > 0 for each in used}
    if given is None and len(spans) != 1:
        raise UserError(
            f"{run.config.model_dir}: its tasks do not say whether targets are a whole text or "
            "spans: set --form=targets or --form=span"
        )
    return given or (SPAN if spans.pop() else TARGETS)
