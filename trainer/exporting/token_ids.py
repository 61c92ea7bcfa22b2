"""Compares the tokenizer of an exported folder with the vocabulary's own library."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.terminal import extras
from tasks.vocabulary import Vocabulary
from trainer.huggingface import configs, tokenizer
from trainer.huggingface.folder_parity import NotEqual
from trainer.huggingface.tokenizer import Match

# Largest allowed share of texts with different ids. SentencePiece and Hugging Face's tokenizers
# legitimately differ on rare characters (see `tokenizer`); a larger share means that the normaliser
# or the model differs.
_DIFFERENT_TEXTS = 0.1


def compare(
    folder: str, written: Mapping[str, Any], vocabulary: Vocabulary, texts: Sequence[str]
) -> Match:
    """Compares a transformers folder's tokenizer, whose config.json is `written`, on texts.

    Raises NotEqual if it gives other ids than the vocabulary's library for too many of them.
    """
    extras.check_triton("transformers")
    from transformers import AutoTokenizer

    trusted = written["model_type"] == configs.CUSTOM or None
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    match = tokenizer.compare(theirs, vocabulary, texts)
    allowed = _DIFFERENT_TEXTS if vocabulary.is_sentencepiece else 0
    if match.other > allowed * match.texts:
        raise NotEqual(
            f"the written tokenizer.json and {match.library} give different ids for "
            f"{len(match.different)} of {match.texts} texts, the first "
            f"{match.different[0][:60]!r}; nothing was written"
        )
    return match


def described(match: Match) -> str:
    """Describes a comparison of ids."""
    equal = match.texts - len(match.different)
    text = f"{equal} of {match.texts} texts have equal ids"
    if match.ties:
        text += f", {match.ties} others have ids of equal score"
    if match.other:
        text += f", {match.other} have other ids, such as {match.different[0][:60]!r}"
    return text
