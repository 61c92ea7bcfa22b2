"""From a corpus to a SentencePiece vocabulary."""
