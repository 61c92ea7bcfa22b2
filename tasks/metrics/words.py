"""Words of texts in any script, for metrics whose libraries know Latin letters or spaces only."""

import re
import sys
import unicodedata
from functools import cache

# Blocks of scripts that are written without spaces between words: Thai, Lao, Myanmar, Khmer, kana,
# Bopomofo and Chinese characters. Source: Unicode's Blocks.txt and its standard, chapters 6.2, 18.
_UNSPACED = (
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3100-\u312f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns patterns of a character of such a script with its marks, and of words."""
    every = map(chr, range(sys.maxunicode + 1))
    # Python's \w leaves marks out, the vowels of Hindi and Thai among them.
    marks = "".join(each for each in every if unicodedata.category(each)[0] == "M")
    return re.compile(rf"[{_UNSPACED}][{marks}]*"), re.compile(rf"(?:[^\W_][{marks}]*)+")


def spaced(text: str) -> str:
    """Returns a text with spaces around each character of a script that is written without them.

    Marks stay with their character. All other texts are returned as they are.
    Source: sacrebleu's tokenizer "zh" does so for Chinese; here also for Japanese, Thai and others.
    """
    return text if text.isascii() else _patterns()[0].sub(r" \g<0> ", text)


class UnicodeWords:
    """A tokenizer for `rouge_score.rouge_scorer.RougeScorer`: words in any script, in lower case.

    A text in ASCII has the tokens of rouge-score's own tokenizer, which cuts words at every other
    character, and takes all others for spaces.
    """

    def tokenize(self, text: str) -> list[str]:
        return _patterns()[1].findall(spaced(text.lower()))
