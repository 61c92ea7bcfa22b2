"""Vocabularies whose special tokens no text spells: a text has them as plain text."""

import json
from collections.abc import Collection
from typing import Any

from tasks.vocabularies import tokenizer_json

# A noncharacter, absent from texts.
_NAME = "\ufdd0{}"


def without(model: bytes, ids: Collection[int]) -> bytes:
    """Returns a vocabulary's file in which no text has the tokens `ids`; ids stay the same."""
    if tokenizer_json.is_tokenizer_json(model):
        return _of_json(json.loads(model), set(ids))
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for token in ids:
        proto.pieces[token].type = proto.pieces[token].CONTROL
    return proto.SerializeToString(deterministic=True)


def _of_json(value: dict[str, Any], ids: set[int]) -> bytes:
    model = value["model"]
    vocab = model["vocab"]
    names = {token["content"] for token in value.get("added_tokens") or () if token["id"] in ids}
    new: dict[str, str] = {}
    if isinstance(vocab, list):
        new |= {
            piece: _NAME.format(token) for token, (piece, _) in enumerate(vocab) if token in ids
        }
        pairs = [[_NAME.format(n) if n in ids else piece, s] for n, (piece, s) in enumerate(vocab)]
        model["vocab"] = pairs
    else:
        new |= {piece: _NAME.format(token) for piece, token in vocab.items() if token in ids}
        model["vocab"] = {new.get(piece, piece): token for piece, token in vocab.items()}
        model["unk_token"] = new.get(model.get("unk_token"), model.get("unk_token"))
    for token in value.get("added_tokens") or ():
        if token["content"] in names:
            token |= {"content": _NAME.format(token["id"]), "normalized": False}
    value["post_processor"] = None
    return json.dumps(value, ensure_ascii=False).encode()
