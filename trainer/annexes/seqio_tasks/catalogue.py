"""Registers our tasks as stock seqio Tasks.

    import seqio
    from trainer.annexes.seqio_tasks import catalogue

    catalogue.register("VOCABULARY_DIR", corpus="parquet:data/*.parquet")
    seqio.add_global_cache_dirs(["CACHE_DIR"])
    seqio.get_mixture_or_task("rlm_span_corruption").get_dataset(
        {"inputs": 512, "targets": 114}, split="train", use_cached=True)

`CacheDatasetPlaceholder` marks the rows of pipeline.build: tokenization and packing come before it,
windows and noise, new in every epoch, after it.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import seqio
import tensorflow as tf

from tasks import registry, vocabulary
from tasks.cache.pack import Documents, Rows, packer
from tasks.document_kind import SIDES, DocumentKind
from tasks.objectives import Lengths, noise
from tasks.reading import sources
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError

__all__ = ["register"]

# Number of rows to concatenate before windows are cut, as T5's reduce_concat_tokens does with
# documents. The last window of each group may be shorter.
_ROWS_PER_GROUP = 128


class TokenizersVocabulary(seqio.Vocabulary):
    """A tokenizer.json or a user's class as a seqio vocabulary, with pipeline.build's ids.

    seqio pads with 0 whatever `pad_id` is; if id 0 is a piece, use lengths to find padding.
    """

    def __init__(self, loaded: vocabulary.Vocabulary):
        self._loaded = loaded
        super().__init__(extra_ids=0)  # `loaded` counts them among its ids

    @property
    def bos_id(self) -> int | None:
        return self._loaded.special.bos

    @property
    def eos_id(self) -> int:
        return self._loaded.special.eos

    @property
    def unk_id(self) -> int | None:
        return self._loaded.special.unk

    @property
    def zero_pads(self) -> bool:
        return self._loaded.special.zero_pads

    @property
    def _base_vocab_size(self) -> int:
        return self._loaded.size

    def _encode(self, s: str) -> list[int]:
        return self._loaded.encode([s])[0].tolist()

    def _decode(self, ids: Iterable[int]) -> str:
        return self._loaded.decode(np.asarray(list(ids)))

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        def encode(text: bytes) -> np.ndarray:
            return self._loaded.encode([text.decode()])[0]

        return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32), [None])

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(self._decode, [ids], tf.string)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizersVocabulary) and self._loaded == other._loaded


def text_vocabulary(loaded: vocabulary.Vocabulary) -> seqio.Vocabulary:
    """Returns the seqio vocabulary with the same ids."""
    if not loaded.is_sentencepiece:
        return TokenizersVocabulary(loaded)
    return seqio.SentencePieceVocabulary(loaded.name, extra_ids=loaded.record.extra_ids)


class CorpusSource(seqio.DataSource):
    """A corpus as a seqio source of elements {"id", "text"}, one shard per piece of the corpus.

    Elements of a corpus of pairs are {"id", "inputs", "targets"}. Bad documents are skipped.
    """

    def __init__(self, corpus_spec: str):
        self._spec = corpus_spec
        super().__init__(splits=("train", "validation"))

    @functools.cached_property
    def _corpus(self) -> sources.Corpus:
        return sources.resolve(sources.parse(self._spec))

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    def _pieces(self, split: str) -> list[sources.Piece]:
        return [piece for piece in self._corpus.pieces if split in piece.splits]

    def list_shards(self, split: str) -> list[str]:
        return [piece.name for piece in self._pieces(split)]

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        *,
        sequence_length: Mapping[str, int] | None = None,
        use_cached: bool = False,
        num_epochs: int | None = 1,
    ) -> tf.data.Dataset:
        """Returns the documents of a split; `shuffle` reorders only the corpus's pieces."""
        pieces = self._pieces(split)
        if shard_info:
            pieces = pieces[shard_info.index :: shard_info.num_shards]
        if shuffle:
            order = np.random.default_rng(seed).permutation(len(pieces))
            pieces = [pieces[index] for index in order]
        names = ("id", *sources.parse(self._spec).unit.columns)

        def documents() -> Iterator[dict[str, str]]:
            for piece in pieces:
                for of_split, batch in sources.read(self._corpus, piece):
                    if of_split != split:
                        continue
                    columns = batch.to_pydict()
                    for problem, *values in zip(
                        columns["problem"], *(columns[name] for name in names), strict=True
                    ):
                        if problem is None:
                            yield dict(zip(names, values, strict=True))

        signature = {name: tf.TensorSpec((), tf.string) for name in names}
        dataset = tf.data.Dataset.from_generator(documents, output_signature=signature)
        return dataset.repeat(num_epochs)


def pack_rows(
    dataset: tf.data.Dataset,
    vocabulary_path: str,
    extra_ids: int,
    packing: str,
    row_tokens: int,
    separator: str,
    task_module: str | None = None,
) -> tf.data.Dataset:
    """Packs documents as pipeline.build does, into {"targets", "document_starts"}, int32 [None]."""
    loaded = _loaded(vocabulary_path, extra_ids, task_module)

    def packed() -> Iterator[Rows]:
        pack = packer(packing, row_tokens, separator, loaded.special.eos)
        for document in dataset.as_numpy_iterator():
            ids = _usable_ids(loaded, document["text"])
            if ids is not None:
                names = pa.array([document["id"].decode()])
                yield pack.add(Documents(names, ids, np.array([len(ids)])))
        yield pack.finish()

    def rows() -> Iterator[dict[str, np.ndarray]]:
        for row in itertools.chain.from_iterable(packed()):
            yield {"targets": row.targets, "document_starts": row.document_starts}

    signature = {name: tf.TensorSpec([None], tf.int32) for name in ("targets", "document_starts")}
    return tf.data.Dataset.from_generator(rows, output_signature=signature)


def encode_pairs(
    dataset: tf.data.Dataset, vocabulary_path: str, extra_ids: int, task_module: str | None = None
) -> tf.data.Dataset:
    """Tokenizes pairs like pipeline.build: {"inputs", "targets"}, each int32 [None], without EOS.

    Pairs with an empty side or with a sentinel are skipped.
    """
    loaded = _loaded(vocabulary_path, extra_ids, task_module)

    def encoded() -> Iterator[dict[str, np.ndarray]]:
        for pair in dataset.as_numpy_iterator():
            found = {side: _usable_ids(loaded, pair[side]) for side in SIDES}
            sides = {side: ids for side, ids in found.items() if ids is not None}
            if len(sides) == len(SIDES):
                yield sides

    signature = {side: tf.TensorSpec([None], tf.int32) for side in SIDES}
    return tf.data.Dataset.from_generator(encoded, output_signature=signature)


def _loaded(path: str, extra_ids: int, task_module: str | None) -> vocabulary.Vocabulary:
    if task_module:  # a worker of seqio_cache_tasks may not have imported it
        registry.load(task_module)
    return vocabulary.load(path, extra_ids)


def _usable_ids(loaded: vocabulary.Vocabulary, text: bytes) -> np.ndarray | None:
    """Returns the ids of a text; None if it has none, or cannot be encoded or has reserved ids."""
    ids = loaded.try_encode(text.decode())
    return None if isinstance(ids, str) or not len(ids) or loaded.reserved[ids].any() else ids


def rows_to_examples(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
    *,
    spec: TaskSpec,
    ids: vocabulary.TokenIds,
    packing: str,
) -> tf.data.Dataset:
    """Makes a task's examples from rows: int32 [None] per feature, EOS included.

    With `concat` packing, windows are cut from groups of concatenated rows; with `best_fit` a row
    is a window. Noise depends on seqio's stateless seeds.
    """
    wanted = sequence_length or {}
    lengths = Lengths(
        wanted.get("inputs", spec.lengths.inputs), wanted.get("targets", spec.lengths.targets)
    )
    window = spec.objective.window_tokens(lengths)
    names = [name for name in spec.objective.features if name in output_features]

    def make(tokens: np.ndarray, seed: np.ndarray) -> list[np.ndarray]:
        windows = -(-len(tokens) // window)
        tokens_WN = np.zeros((windows, window), np.int32)
        tokens_WN.reshape(-1)[: len(tokens)] = tokens
        lengths_W = np.full(windows, window)
        lengths_W[-1:] = len(tokens) - (windows - 1) * window
        key = noise.fold_in(seed[0], seed[1])
        examples = spec.objective.examples(
            tokens_WN, lengths_W, noise.fold_in(key, np.arange(windows)), lengths, ids
        )
        out: list[np.ndarray] = []
        for name in names:
            values_WN, sizes_W = examples[name]
            out += [values_WN[noise.within(sizes_W, values_WN.shape[1])], sizes_W.astype(np.int64)]
        return out

    @seqio.map_over_dataset(num_seeds=1)
    def to_examples(tokens: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.RaggedTensor]:
        flat = tf.numpy_function(make, [tokens, seed], [tf.int32, tf.int64] * len(names))
        return {
            name: tf.RaggedTensor.from_row_lengths(
                tf.ensure_shape(flat[2 * place], [None]),
                tf.ensure_shape(flat[2 * place + 1], [None]),
                validate=False,
            )
            for place, name in enumerate(names)
        }

    tokens = dataset.map(lambda row: row["targets"])
    if packing == "concat":
        tokens = tokens.ragged_batch(_ROWS_PER_GROUP).map(lambda rows: rows.flat_values)
    return to_examples(tokens).unbatch()


def register(
    vocabulary_path: str,
    corpus: str | None = None,
    names: Iterable[str] | None = None,
    *,
    task_module: str | None = None,
    extra_ids: int = 0,
    packing: str = "concat",
    row_tokens: int | None = None,
    separator: str | None = None,
) -> list[seqio.Task]:
    """Registers tasks with seqio, replacing earlier ones, and returns them.

    Args:
      vocabulary_path: as for pipeline.build's --vocabulary.
      corpus: SPEC that replaces each task's own corpus; read only without a cache.
      names: tasks to register; by default all that the vocabulary and separator support.
      task_module: your own Python module that defines TASKS or registers the vocabulary.
      extra_ids, packing, row_tokens, separator: as for pipeline.build's flags.

    Raises UserError if a task or the vocabulary is unknown, or an objective needs different
    pieces or a different separator.
    """
    loaded = _loaded(vocabulary_path, extra_ids, task_module)
    chosen = [registry.get(name, task_module) for name in names or registry.tasks(task_module)]
    opens = {
        "vocabulary_path": vocabulary_path,
        "extra_ids": extra_ids,
        "task_module": task_module if loaded.is_registered else None,
    }
    made = []
    for spec in chosen:
        packs: dict[str, Any] = {
            "packing": packing,
            "row_tokens": row_tokens or spec.window_tokens,
            "separator": separator or spec.objective.separator or "none",
        }
        try:
            spec.check(spec.lengths, loaded.ids, packs["separator"], vocabulary_path)
        except UserError:
            if names:
                raise
            continue
        made.append(_register_one(spec, corpus or spec.corpus, loaded, opens, packs))
    return made


def _register_one(
    spec: TaskSpec,
    corpus: str,
    loaded: vocabulary.Vocabulary,
    opens: dict[str, Any],
    packs: dict[str, Any],
) -> seqio.Task:
    text = seqio.Feature(text_vocabulary(loaded), add_eos=True)
    number = seqio.Feature(seqio.PassThroughVocabulary(loaded.size), add_eos=False)
    steps: list[Any] = [
        functools.partial(pack_rows, **opens, **packs),
        seqio.CacheDatasetPlaceholder(),
        functools.partial(rows_to_examples, spec=spec, ids=loaded.ids, packing=packs["packing"]),
    ]
    if spec.objective.unit is DocumentKind.PAIR:  # T5's own steps, which cut overlong sides
        steps = [
            functools.partial(encode_pairs, **opens),
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ]
    seqio.TaskRegistry.remove(spec.name)
    return seqio.TaskRegistry.add(
        spec.name,
        source=CorpusSource(corpus),
        preprocessors=steps,
        output_features={
            name: text if name in ("inputs", "targets") else number
            for name in spec.objective.features
        },
        metric_fns=[],
    )
