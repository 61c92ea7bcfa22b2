"""Any literal is read, or refused in one line that names its place."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.gin import mesh_tables, recipe, t5x

T5X = (
    ["t5x/examples/t5/t5_1_1/tiny.gin", "t5x/configs/runs/pretrain.gin"],
    [
        *("MODEL_DIR='x'", "MIXTURE_OR_TASK_NAME='a'", "TRAIN_STEPS=5", "DROPOUT_RATE=0.0"),
        "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    ],
)
MESH = (
    ["dataset.gin", "models/t5.1.1.base.gin", "objectives/span.gin"],
    ["MIXTURE_NAME='c4_x'", "run.train_steps=9", "run.batch_size=('sequences_per_batch', 8)"],
)
VALUES = (None, True, -1, 2.5, "word", [[1]], {"a": [1]})


def arguments(known):
    return sorted({(each.names[0], name) for each in known for name in each.arguments}, key=str)


@pytest.mark.parametrize(
    ("files", "flags", "known"),
    [(*T5X, t5x.KNOWN), (*MESH, mesh_tables.KNOWN)],
    ids=["t5x", "mesh"],
)
def test_any_value_of_any_argument(files, flags, known):
    refused = taken = 0
    for place, (configurable, argument) in enumerate(arguments(known)):
        # Two values each, other ones from argument to argument.
        for value in (VALUES * 2)[place % len(VALUES) :][:2]:
            binding = f"{configurable}.{argument}"
            try:
                recipe.load(files, [], [*flags, f"{binding} = {value!r}"], None, [])
                taken += 1
            except UserError as error:
                refused += 1
                message = str(error)
                assert "\n" not in message
                assert binding in message or "these files name no model" in message, message
    assert refused > 50
    assert taken > 50
