"""Adds pieces to a vocabulary; every old piece keeps its id and its score.

    old   pieces 0 … P-1 | sentinels
    new   pieces 0 … P-1 | new pieces | sentinels

Only sentinels move, because T5 counts them from the end. A new piece's score comes from a unigram
model of the new corpus, shifted by the median difference between the two models' scores for shared
pieces, so text without new pieces is segmented as before. BPE is not supported: merges learned on
other text start from pieces that the old merges never produce.
"""

import statistics

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from vocab.protos import add, proto_of


def settings(base: vocabulary.Vocabulary) -> dict[str, object]:
    """Returns the options that an extended vocabulary inherits; a unigram model with T5's ids."""
    if not (base.is_sentencepiece and base.special == vocabulary.T5_IDS):
        raise UserError(
            f"--extend={base.name}: only SentencePiece models with T5's ids can be extended "
            "(pad 0, eos 1, unk 2)"
        )
    proto = proto_of(base.model)
    spec = proto.trainer_spec
    if spec.model_type != spec.UNIGRAM:
        name = spec.ModelType.Name(spec.model_type).lower()
        raise UserError(f"--extend supports unigram vocabularies only; this one is {name}")
    found: dict[str, object] = {
        "model_type": "unigram",
        "byte_fallback": spec.byte_fallback,
        "normalization": proto.normalizer_spec.name,
        "keep_whitespace": not proto.normalizer_spec.remove_extra_whitespaces,
    }
    return found | ({"extra_ids": base.record.sentinels} if base.record.sentinels else {})


def symbols(model: bytes) -> tuple[str, ...]:
    pieces = proto_of(model).pieces
    return tuple(piece.piece for piece in pieces if piece.type == piece.USER_DEFINED)


def with_symbols(model: bytes, more: tuple[str, ...]) -> bytes:
    proto = proto_of(model)
    add(proto, more, "the vocabulary to extend already has the piece {!r}")
    return proto.SerializeToString(deterministic=True)


def extend(
    base: vocabulary.Vocabulary, learned: bytes, size: int, user_defined: tuple[str, ...]
) -> bytes:
    """Returns a model of `size` pieces: the base's, `user_defined`, and the best of `learned`.

    The sentinels of `base` are left out; vocab.train adds them again at the end. Raises UserError
    if `learned` has too few new pieces, or `size` is too small.
    """
    proto = proto_of(base.model)
    del proto.pieces[base.record.pieces - own_sentinels(base) :]
    normal = proto.SentencePiece.NORMAL
    known = {piece.piece: piece.score for piece in proto.pieces}
    old_count = len(proto.pieces)
    candidates = [piece for piece in proto_of(learned).pieces if piece.type == normal]
    shared = [known[new.piece] - new.score for new in candidates if new.piece in known]
    shift = statistics.median(shared) if shared else 0.0
    for symbol in user_defined:
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    wanted = size - len(proto.pieces)
    new = [piece for piece in candidates if piece.piece not in known]
    # Single characters come first: a longer piece is of little use if its characters lack pieces.
    new.sort(key=lambda piece: len(piece.piece) > 1)
    characters = sum(len(piece.piece) == 1 for piece in new)
    if wanted < max(characters, 1):
        raise UserError(
            f"--vocab_size={size} is too small: the vocabulary to extend has {old_count:,} pieces "
            f"without its sentinels, {len(user_defined):,} symbols are added, and the corpus has "
            f"{characters:,} new characters (see --character_coverage)"
        )
    if wanted > len(new):
        raise UserError(
            f"--vocab_size={size} is too large: the vocabulary to extend has {old_count:,} pieces, "
            f"and the corpus yields {len(new):,} new ones"
        )
    for piece in sorted(new[:wanted], key=lambda piece: -piece.score):
        proto.pieces.add(piece=piece.piece, score=piece.score + shift)
    return proto.SerializeToString(deterministic=True)


def own_sentinels(base: vocabulary.Vocabulary) -> int:
    """Returns the number of sentinels that are pieces of the model itself."""
    return base.record.sentinels - base.record.extra_ids


def id_map(base: vocabulary.Vocabulary, size: int, sentinels: int) -> list[int]:
    """Returns the new id of each old id, for `size` ids that end with `sentinels` sentinels.

    If the model of `base` has no sentinels, the map covers those T5 adds after its last piece.
    """
    own = own_sentinels(base)
    pieces = base.record.pieces - own
    return [*range(pieces), *range(size - (own or sentinels), size)]
