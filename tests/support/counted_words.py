"""The words that vocab.train counts, found in Python with regular expressions and SentencePiece."""

import re

import sentencepiece

from vocab import word_splitter
from vocab.word_splitter import SPACE


def passages(text):
    """Yields a document in passages, cut at line ends, failing that at sentence ends or spaces."""
    start, most = 0, word_splitter.PASSAGE_CHARACTERS
    while start < len(text):
        end = start + most
        if end < len(text):
            cuts = (text.rfind(mark, start, end) + len(mark) for mark in ("\n", ". ", " "))
            end = next((cut for cut in cuts if cut > start + most // 2), end)
        yield text[start:end]
        start = end


SIGNS, LETTERS = word_splitter._SIGNS, word_splitter._LETTERS
CUT = re.compile(f"(?<=[{LETTERS}])(?=[{SIGNS}])|(?<=[{SIGNS}])(?=[{LETTERS}])")
RUNS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


def words_of(splitter, texts):
    """Yields the words of texts, found with regular expressions and SentencePiece."""
    normalize = sentencepiece.SentencePieceProcessor(model_proto=splitter.model).normalize
    marks = sorted([*splitter.symbols, *word_splitter._NEVER], key=len, reverse=True)
    split = re.compile("|".join(map(re.escape, marks))).split
    for passage in (each for text in texts for each in passages(text)):
        for part in split(normalize(passage)):
            words = [SPACE + word for word in part.split(SPACE)]
            words[0] = words[0].removeprefix(SPACE)
            for word in RUNS.findall(part) if splitter.space_runs else words:
                for cut in CUT.split(word):
                    for start in range(0, len(cut), word_splitter.LONGEST_WORD):
                        yield cut[start : start + word_splitter.LONGEST_WORD]
