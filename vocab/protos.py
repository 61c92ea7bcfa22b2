"""SentencePiece models as protocol buffers, whose pieces can be changed."""

from collections.abc import Iterable
from typing import Any

from tasks.terminal.command_line import UserError


def proto_of(model: bytes) -> Any:
    """Returns the ModelProto of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)


def add(proto: Any, symbols: Iterable[str], refusal: str) -> None:
    """Appends user-defined pieces to a model; raises UserError if one of them already exists."""
    present = {piece.piece for piece in proto.pieces}
    for symbol in symbols:
        if symbol in present:
            raise UserError(refusal.format(symbol))
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
