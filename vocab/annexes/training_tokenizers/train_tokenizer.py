"""Trains a byte-level BPE or WordPiece tokenizer.json.

    palimpsest vocab train_tokenizer --kind=byte_bpe --corpus=SPEC --vocab_size=32000 --output=DIR

The folder suits transformers: `AutoTokenizer.from_pretrained(FOLDER)` loads it. One process counts
words in memory; `python -m vocab.train` makes SentencePiece models from corpora of any size.
Byte-level BPE gives the same bytes every time. Among equally frequent WordPieces, `tokenizers` may
choose differently in each run.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator
from typing import Any

from tasks import vocabulary
from tasks.cache.manifest import MANIFEST, as_json
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, at_least, field
from tasks.vocabularies import tokenizer_json
from vocab import fit, folder, weighting
from vocab.weighting import Corpora, CorporaFlags, as_corpora

BYTE_BPE, WORDPIECE = "byte_bpe", "wordpiece"
# Special tokens by role, in id order: T5's ids for byte-level BPE, BERT's for WordPiece.
SPECIAL = {
    BYTE_BPE: {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    WORDPIECE: {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
}
_CONFIG = tokenizer_json.CONFIGS[0]
_REPORT = "report.json"
# In the order written; the manifest comes last.
_FILES = (_REPORT, tokenizer_json.FILE, _CONFIG)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a vocabulary; `vocab_size` includes special tokens but not sentinels.

    Sentinels get the last ids. `cased` keeps case and accents in WordPiece.
    """

    kind: str
    vocab_size: int = 32000
    extra_ids: int = 100
    cased: bool = False


def train(options: Options, corpus: sources.Corpus | Corpora, output: str) -> vocabulary.Vocabulary:
    """Writes the vocabulary to the folder `output` and returns it; keeps a finished one."""
    corpora = as_corpora(corpus)
    manifest = {"options": dataclasses.asdict(options), "corpus": corpora.record}
    if folder.finished(output, manifest["options"], corpora.record):
        return vocabulary.load(output)
    with folder.claimed(output, _FILES) as held:
        model = _trained(options, corpora).to_str(pretty=True).encode()
        loaded = vocabulary.from_bytes(model)
        measured = {name: fit.measure(loaded, each) for name, each in corpora.parts.items()}
        files.write_json(files.join(output, _REPORT), fit.as_json(measured))
        files.write_bytes(files.join(output, tokenizer_json.FILE), model)
        named = {f"{role}_token": piece for role, piece in SPECIAL[options.kind].items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        files.write_json(files.join(output, _CONFIG), config)
        loaded = vocabulary.load(output)
        software = {"tokenizers": importlib.metadata.version("tokenizers")}
        written = {"model": as_json(loaded.record), **manifest, "software": software}
        held.check()
        files.write_json(files.join(output, MANIFEST), written)
    return loaded


def _trained(options: Options, corpora: Corpora) -> Any:
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    special = SPECIAL[options.kind]
    given: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "special_tokens": [*special.values()],
        "show_progress": False,
    }
    trainer: Any
    if options.kind == BYTE_BPE:
        # Split into words as GPT-2, but add no space before the first: decoding restores the text.
        tokenizer = Tokenizer(models.BPE(unk_token=special["unk"]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **given)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk"]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not options.cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**given)
    factors = dict.fromkeys(corpora.parts, 1.0)
    if len(factors) > 1:
        sizes = {
            name: sum(len(text.encode()) for text in _texts(each))
            for name, each in corpora.parts.items()
        }
        factors = corpora.factors(sizes)
        print(weighting.shares(sizes, factors))
    texts = (_texts(each, factors[name]) for name, each in corpora.parts.items())
    with progress.shown(f"training {options.vocab_size:,} pieces", None):
        tokenizer.train_from_iterator(itertools.chain.from_iterable(texts), trainer)
    size = tokenizer.get_vocab_size()
    if size != options.vocab_size:
        raise UserError(
            f"--vocab_size={options.vocab_size}: the corpus yields {size:,} pieces; "
            + ("use more text" if size < options.vocab_size else f"give {size:,} or more")
        )
    sentinels = map(vocabulary.sentinel_piece, reversed(range(options.extra_ids)))
    tokenizer.add_special_tokens([AddedToken(sentinel, normalized=False) for sentinel in sentinels])
    return tokenizer


def _texts(corpus: sources.Corpus, times: float = 1.0) -> Iterator[str]:
    """Yields the training split's texts, each `times` times, because `tokenizers` takes no counts.

    The fraction of `times` is the share of documents, by hash of their ids, yielded once more.
    """
    columns = corpus.spec.unit.columns
    whole, rest = int(times), times % 1
    for piece in corpus.pieces:
        for split, batch in sources.read(corpus, piece):
            if split != sources.TRAIN:
                continue
            ids = (id.encode() for id in batch.column("id").to_pylist())
            drawn = [int.from_bytes(hashlib.blake2b(id, digest_size=6).digest()) for id in ids]
            repeats = [whole + (rest > number / 2**48) for number in drawn]
            for name in columns:
                for text, count in zip(batch.column(name).to_pylist(), repeats, strict=True):
                    if text:
                        yield from itertools.repeat(text, count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(CorporaFlags):
    """Flags of the command."""

    kind: str = field(REQUIRED, "kind of tokenizer: GPT-2's or BERT's", choices=tuple(SPECIAL))
    output: str = field(REQUIRED, "folder to write, local or remote", metavar="DIR")
    vocab_size: int = field(32000, "number of pieces without sentinels", rule=at_least(1))
    extra_ids: int = field(100, "number of sentinels, which get the last ids", rule=at_least(0))
    cased: bool | None = field(
        None,
        "with --kind=wordpiece, keep case and accents",
        read_if=ReadIf(
            lambda flags: flags.kind == WORDPIECE, "with --kind=byte_bpe, which keeps all bytes"
        ),
        alone="true",
    )


def run(flags: Flags) -> None:
    """Trains, and prints a report."""
    options = Options(flags.kind, flags.vocab_size, flags.extra_ids, bool(flags.cased))
    corpora = weighting.corpora_of(flags)
    loaded = train(options, corpora, flags.output)
    print(f"{loaded.size:,} ids: {options.vocab_size:,} pieces, {options.extra_ids} sentinels")
    measured = fit.read(files.join(flags.output, _REPORT))
    print(fit.table(list(measured.items())))
    task = "masked_lm" if options.kind == WORDPIECE else "span_corruption"
    print(weighting.next_build(flags, corpora, flags.output, task))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
