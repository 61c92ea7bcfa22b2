"""Overlap of n-grams and subsequences: BLEU and chrF by sacrebleu, ROUGE by rouge-score."""

import itertools
from collections.abc import Sequence
from typing import Any

from tasks.metrics.text import of_examples, references
from tasks.metrics.words import UnicodeWords, spaced


@of_examples
def bleu(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns corpus BLEU with sacrebleu's "13a" tokens, 0 to 100, as used for WMT.

    Texts in scripts without spaces are compared by characters, as sacrebleu's "zh" does. Texts of
    fewer than four words have none of BLEU's longest n-grams, so their BLEU is 0 even if equal.

    Source: Post 2018 (arXiv:1804.08771).
    """
    return {"bleu": _bleu(targets, predictions, "13a")}


@of_examples
def bleu_intl(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns corpus BLEU with sacrebleu's "intl" tokens, 0 to 100, as T5 reports it.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.3; T5, `metrics.bleu`.
    """
    return {"bleu_intl": _bleu(targets, predictions, "intl")}


def _bleu(targets: Sequence[Any], predictions: Sequence[str], tokens: str) -> float:
    import sacrebleu

    if _are_empty(targets, predictions):
        return 100.0
    streams = [[each and spaced(each) for each in stream] for stream in _streams(targets)]
    given = list(map(spaced, predictions))
    return sacrebleu.corpus_bleu(given, streams, tokenize=tokens).score


@of_examples
def chrf(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns corpus chrF2 by sacrebleu, 0 to 100.

    Source: Popović 2015, "chrF: character n-gram F-score for automatic MT evaluation".
    """
    import sacrebleu

    if _are_empty(targets, predictions):
        return {"chrf": 100.0}
    return {"chrf": sacrebleu.corpus_chrf(list(predictions), _streams(targets)).score}


def _are_empty(targets: Sequence[Any], predictions: Sequence[str]) -> bool:
    """Returns whether all predictions are empty, and right; sacrebleu's score of these is 0."""
    texts = [references(target) for target in targets]
    accepted = all(not all(each.strip() for each in of) for of in texts)
    return accepted and not any(prediction.strip() for prediction in predictions)


def _streams(targets: Sequence[Any]) -> list[list[Any]]:
    """Returns the first references of all examples, then the second ones, None if missing."""
    return list(map(list, itertools.zip_longest(*map(references, targets))))


@of_examples
def rouge(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 of unstemmed ROUGE-1, ROUGE-2 and ROUGE-L, in percent.

    "rougeLsum" compares sentences, which T5's data end with " . " and others with a newline.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"; rouge-score; T5,
    `metrics.rouge_mean`.
    Differences: T5's tasks report the middle of a bootstrap; this is the mean. Words are Unicode's;
    rouge-score and T5 know the letters a to z only, and cut words at others. An empty prediction of
    an empty target is right; theirs is 0.
    """
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ("rouge1", "rouge2", "rougeLsum")
    scorer = RougeScorer(kinds, tokenizer=UnicodeWords())
    sums = dict.fromkeys(kinds, 0.0)
    for target, prediction in zip(targets, predictions, strict=True):
        texts = [_sentences(reference) for reference in references(target)]
        if _are_empty([target], [prediction]):
            sums = {kind: total + 1.0 for kind, total in sums.items()}
            continue
        scores = scorer.score_multi(texts, _sentences(prediction))
        for kind in kinds:
            sums[kind] += scores[kind].fmeasure
    return {kind: 100 * total / len(targets) for kind, total in sums.items()}


def _sentences(text: str) -> str:
    return text.replace(" . ", " .\n")
