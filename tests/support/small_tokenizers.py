"""Small vocabularies of every kind, trained on a text: folders as their makers write them."""

import json
import pathlib
from collections.abc import Callable, Iterable

import sentencepiece
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SIZE = 400
_DOCS = pathlib.Path(__file__).parents[2] / "docs"


def documents(count: int) -> list[str]:
    """Returns paragraphs of the project's documentation, at most 700 characters of each."""
    texts = [path.read_text() for path in sorted(_DOCS.glob("*.md"))]
    return [part[:700] for text in texts for part in text.split("\n\n") if part.strip()][:count]


# Llama 3's words, in short. Source: meta-llama/llama3, `tokenizer.py`.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def _saved(folder: pathlib.Path, tokenizer: Tokenizer, **special: str) -> str:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if special:
        config = {f"{role}_token": piece for role, piece in special.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def gpt2(folder: pathlib.Path, lines: Iterable[str], size: int = SIZE) -> str:
    """Byte-level BPE whose only special token is the last id: id 0 is a piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = "<|endoftext|>"
    return _saved(folder, tokenizer, bos=end, eos=end, unk=end)


def llama3(folder: pathlib.Path, lines: Iterable[str]) -> str:
    """Byte-level BPE with other words, and BOS and EOS of its own; the file alone."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return _saved(folder, tokenizer)


def bert(
    folder: pathlib.Path, lines: Iterable[str], lowercase: bool = True, size: int = SIZE
) -> str:
    """WordPiece, without case or with it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    return _saved(folder, tokenizer, **names)


def unigram(folder: pathlib.Path, lines: Iterable[str]) -> str:
    """Unigram with SentencePiece's mark for a space; padding is not id 0."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return _saved(folder, tokenizer)


def t5(prefix: pathlib.Path, lines: Iterable[str], size: int, **options) -> str:
    """SentencePiece with T5's ids and no sentinels; returns the path of PREFIX.model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=size, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return f"{prefix}.model"


def _model(
    folder: pathlib.Path, lines: Iterable[str], name: str, size: int = SIZE, **options
) -> str:
    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / name),
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        **options,
    )
    (folder / f"{name}.vocab").unlink()
    return str(folder)


def llama(folder: pathlib.Path, lines: Iterable[str], size: int = SIZE) -> str:
    """SentencePiece with Llama's ids, of which 0 is the unknown piece, and no padding."""
    return _model(folder, lines, "tokenizer", size)


def gemma(folder: pathlib.Path, lines: Iterable[str]) -> str:
    """SentencePiece with Gemma's ids: padding, EOS, BOS, unknown."""
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    return _model(folder, lines, "tokenizer", add_dummy_prefix=False, **ids)


def byte(folder: pathlib.Path, lines: Iterable[str]) -> str:
    """The vocabulary of bytes."""
    return "bytes"


KINDS: dict[str, Callable[[pathlib.Path, Iterable[str]], str]] = {
    each.__name__: each for each in (gpt2, llama3, bert, unigram, llama, gemma, byte)
}


def without_sentinels(model: bytes) -> bytes:
    """Returns a SentencePiece model without its last pieces, the 100 sentinels."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    del proto.pieces[-100:]
    return proto.SerializeToString()
