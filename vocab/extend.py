"""A vocabulary with more pieces in which every old piece keeps its id and its score.

    old   pieces 0 … P-1 | sentinels
    new   pieces 0 … P-1 | new pieces | sentinels

Sentinels have to be the last ids (T5 counts them from the end), so they alone move; `id_map` says
where to, and a checkpoint's rows can follow it.

A new piece's score is what it has in a unigram model of the new corpus, shifted by the median
difference between the scores of pieces that both models have. Text in which no new piece occurs is
segmented as before, and where one occurs it wins by the same margin that it has in the new corpus's
own model. BPE is refused: there a piece is a step of a sequence of merges, and merges learned on
another text begin from pieces that the old ones never leave.
"""

import statistics

from tasks import vocabulary
from tasks.terminal.command_line import UserError


def settings(base: vocabulary.Vocabulary) -> dict[str, object]:
    """Returns the options of vocab.train that an extended vocabulary takes over.

    Raises:
      UserError: the model is not a unigram model.
    """
    proto = _proto(base.model)
    spec = proto.trainer_spec
    if spec.model_type != spec.UNIGRAM:
        name = spec.ModelType.Name(spec.model_type).lower()
        raise UserError(f"--extend takes unigram vocabularies, and this is one of {name}")
    found: dict[str, object] = {
        "model_type": "unigram",
        "byte_fallback": spec.byte_fallback,
        "normalization": proto.normalizer_spec.name,
        "keep_whitespace": not proto.normalizer_spec.remove_extra_whitespaces,
    }
    return found | ({"extra_ids": base.record.sentinels} if base.record.sentinels else {})


def symbols(model: bytes) -> tuple[str, ...]:
    """The pieces of a model that stand for themselves in any text, sentinels included."""
    return tuple(piece.piece for piece in _proto(model).pieces if piece.type == piece.USER_DEFINED)


def with_symbols(model: bytes, more: tuple[str, ...]) -> bytes:
    """Returns the model with `more` of such pieces at its end.

    Raises:
      UserError: one of them is a piece already.
    """
    proto = _proto(model)
    present = {piece.piece for piece in proto.pieces}
    for symbol in more:
        if symbol in present:
            raise UserError(f"the vocabulary to extend has the piece {symbol!r} already")
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString(deterministic=True)


def extend(
    base: vocabulary.Vocabulary, learned: bytes, size: int, user_defined: tuple[str, ...]
) -> bytes:
    """Returns the pieces of `base`, then `user_defined`, then the best of `learned`: `size` in all.

    The sentinels of `base` are left out; vocab.train puts them at the end again.

    Raises:
      UserError: `learned` has too few pieces that `base` has not.
    """
    proto = _proto(base.model)
    del proto.pieces[base.record.pieces - own_sentinels(base) :]
    normal = proto.SentencePiece.NORMAL
    known = {piece.piece: piece.score for piece in proto.pieces}
    old_count = len(proto.pieces)
    candidates = [piece for piece in _proto(learned).pieces if piece.type == normal]
    shared = [known[each.piece] - each.score for each in candidates if each.piece in known]
    shift = statistics.median(shared) if shared else 0.0
    for symbol in user_defined:
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    wanted = size - len(proto.pieces)
    new = [piece for piece in candidates if piece.piece not in known]
    # Characters come first: a piece that the vocabulary could not spell would be of little use.
    new.sort(key=lambda piece: len(piece.piece) > 1)
    characters = sum(len(piece.piece) == 1 for piece in new)
    if wanted < max(characters, 1):
        raise UserError(
            f"--vocab_size={size} is too small: the vocabulary to extend has {old_count:,} pieces "
            f"without its sentinels, {len(user_defined):,} symbols are to be added, and the corpus "
            f"has {characters:,} new characters (see --character_coverage)"
        )
    if wanted > len(new):
        raise UserError(
            f"--vocab_size={size} is too large: the vocabulary to extend has {old_count:,} pieces, "
            f"and the corpus gives {len(new):,} new ones"
        )
    for piece in sorted(new[:wanted], key=lambda piece: -piece.score):
        proto.pieces.add(piece=piece.piece, score=piece.score + shift)
    return proto.SerializeToString(deterministic=True)


def own_sentinels(base: vocabulary.Vocabulary) -> int:
    """How many pieces of the model itself are sentinels."""
    return base.record.sentinels - base.record.extra_ids


def id_map(base: vocabulary.Vocabulary, size: int, sentinels: int) -> list[int]:
    """Returns for each id of `base` its id among `size` ids of which the last are `sentinels`.

    Where the model of `base` has no sentinels, the map goes on with those that T5 adds after it.
    """
    own = own_sentinels(base)
    pieces = base.record.pieces - own
    return [*range(pieces), *range(size - (own or sentinels), size)]


def _proto(model: bytes):
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)
