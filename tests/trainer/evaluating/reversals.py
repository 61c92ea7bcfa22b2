"""A seqio task with metrics of all kinds, and a program that evaluates it on several devices.

    python tests/trainer/evaluating/reversals.py FOLDER BATCH_SIZE [FLAG …]

The text of this module is also the user's --task_module, as reversals in FOLDER.
"""

import json
import sys

MODULE = """
import flax
import seqio
from tasks.metrics.metric import Metric

FOLDER = {folder!r}
VOCABULARY = seqio.SentencePieceVocabulary(FOLDER + "/vocabulary/sentencepiece.model")


def rows(split, shuffle_files, seed=None):
    import tensorflow as tf

    lines = open(FOLDER + "/" + split + ".txt").read().splitlines()[:{rows}]
    words = [" ".join(line.split()[:3]) for line in lines]
    return tf.data.Dataset.from_tensor_slices(
        {{"inputs": words, "targets": [" ".join(each.split()[::-1]) for each in words]}}
    )


def shortened(text, example, is_target):
    return text[:40] + ("" if is_target else example["inputs_pretokenized"].decode()[:5])


def lengths(targets, predictions):
    pairs = [len(p) / (1 + len(t)) for t, p in zip(targets, predictions)]
    return {{"length_ratio": sum(pairs), "words": seqio.metrics.Scalar(sum(map(len, predictions)))}}


def likelihood(targets, scores):
    return {{"total_score": float(sum(scores)), "target_length": sum(map(len, targets))}}


def confident(targets, predictions, aux_values):
    return {{"confidence": float(sum(aux_values["scores"]))}}


def first_letters(targets, predictions):
    return {{"first_letters": sum(t[:1] == p[:1] for t, p in zip(targets, predictions))}}


class Longest(seqio.metrics.CollectingMetric):
    model_output_type = seqio.metrics.ModelOutputType.PREDICTION_WITH_AUX

    def actual_compute(self, rows, features, target_field_name="targets", cached_targets=None):
        ids, aux = self.values["model_output"]
        texts = [features[target_field_name].vocabulary.decode(row.tolist()) for row in ids]
        best = int(aux["scores"].argmax())
        inputs = [row["inputs_pretokenized"].decode() for row in rows]
        values = {{"longest": max(map(len, texts)), "best": len(texts[best] + inputs[best])}}
        return values, {{"targets": cached_targets}}


@flax.struct.dataclass
class Tokens(seqio.metrics.Metric):
    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.PREDICTION
    count: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, *_):
        return cls(count=int((model_output > 0).sum()) + sum(len(row["targets"]) for row in inputs))

    def compute(self):
        return {{"tokens": self.count}}


@flax.struct.dataclass
class Likely(Tokens):
    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.SCORE

    @classmethod
    def from_model_output(cls, inputs, model_output, features, *_):
        return cls(count=float(model_output.max()))

    def compute(self):
        return {{"likeliest": self.count}}


METRICS = (Metric("first_letters", first_letters),)

for name, metrics in (
    ("", {{"postprocess_fn": shortened, "metric_fns": [lengths, likelihood, confident]}}),
    ("_by_objects", {{"metric_objs": [Longest, Tokens(), Likely()]}}),
):
    seqio.TaskRegistry.add(
        "reversals" + name,
        source=seqio.FunctionDataSource(rows, splits=["train", "validation"]),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={{side: seqio.Feature(VOCABULARY) for side in ("inputs", "targets")}},
        **metrics,
    )
"""
FLAGS = [
    "--task=seqio:reversals",
    "--task_module=reversals",
    *("--lengths.inputs=24", "--lengths.targets=16", "--batch_size=8", "--data.shuffle=none"),
]


def prepared(preset: str, *flags: str):
    """Returns a run on the task."""
    from trainer.config.from_flags import build_config
    from trainer.setup import prepare

    return prepare(*build_config(preset, list(flags)))


def evaluate(folder: str, batch_size: int, *flags: str, preset: str = "t5_1_1_tiny"):
    """Returns (results, lines of predictions) of a model's initial parameters."""
    import os

    sys.path.insert(0, folder)
    from trainer.engine.program import Program
    from trainer.evaluating.evaluation import Evaluation

    model_dir = os.path.join(folder, f"model_{os.getpid()}_{batch_size}")
    flags = (*FLAGS, f"--model_dir={model_dir}", f"--evaluation.batch_size={batch_size}", *flags)
    run = prepared(preset, *flags)
    program = Program(run)
    results = Evaluation(run, "validation", program)(program.initial_state().params, 0)
    with open(os.path.join(model_dir, "predictions", "validation_0.jsonl")) as file:
        return results, [json.loads(line) for line in file]


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
