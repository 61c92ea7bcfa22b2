"""SentencePiece ids from compiled code."""
