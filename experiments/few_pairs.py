"""Draws a few pairs of a data set to train on.

    python -m experiments.few_pairs --pairs=SPEC --count=64 --seed=0 --output=DIR

Writes train.jsonl of `count` pairs, as many of each target as there can be if targets repeat, and
validation.jsonl of the pairs held out, at most --held_out of them; inputs of the whole validation
split are not in train.jsonl. Prints how many of the pairs held out have the most frequent target.
"""

import dataclasses
import itertools
import json
import random
from collections import Counter, defaultdict

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    pairs: str = field(
        REQUIRED, "pairs, as in pipeline.build: SPEC?inputs=…&targets=…", metavar="SPEC"
    )
    count: int = field(REQUIRED, "pairs to draw", rule=at_least(1))
    seed: int = field(0, "seed of the draw")
    held_out: int = field(1000, "most pairs of the validation split", rule=at_least(1))
    output: str = field(REQUIRED, "folder for the pairs", metavar="DIR")


def run(flags: Flags) -> None:
    """Writes the pairs unless they already exist."""
    if files.exists(path := files.join(flags.output, "train.jsonl")):
        print(f"{path} exists and is kept: to draw others, name another --output")
        return
    from tasks.reading import sources

    splits: dict[str, list[dict[str, str]]] = {"validation": [], "train": []}
    for split, row in sources.documents(flags.pairs):
        if row.get("inputs") and row.get("targets"):
            splits[split].append({name: row[name] for name in ("inputs", "targets")})
    held_out = {row["inputs"] for row in splits["validation"]}
    splits["train"] = [row for row in splits["train"] if row["inputs"] not in held_out]
    if len(splits["train"]) < flags.count or not held_out:
        raise UserError(
            f"--pairs={flags.pairs} has {len(splits['train']):,} pairs to train on and "
            f"{len(splits['validation']):,} held out: take a --count of at most the first, and a "
            "corpus with ?inputs=…&targets=… and a validation split, such as …&validation=0.1"
        )
    draw = random.Random(flags.seed)
    splits["train"] = drawn(splits["train"], flags.count, draw)
    # The same ones for each seed; the first ones may all be of one label.
    most = min(flags.held_out, len(splits["validation"]))
    splits["validation"] = random.Random(0).sample(splits["validation"], most)
    files.make_folder(flags.output)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files.write_bytes(files.join(flags.output, f"{split}.jsonl"), lines.encode())
    targets = Counter(row["targets"] for row in splits["validation"])
    ((target, count),) = targets.most_common(1)
    share = 100 * count / targets.total()
    print(f"{flags.output}: {share:.1f} % of the pairs held out have the target {target!r}")


def drawn(rows: list[dict[str, str]], count: int, draw: random.Random) -> list[dict[str, str]]:
    """Returns `count` of the rows, drawn in turn from the rows of each target."""
    by_target: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in draw.sample(rows, len(rows)):
        by_target[row["targets"]].append(row)
    most = max(map(len, by_target.values()))
    turns = (row for turn in range(most) for some in by_target.values() for row in some[turn:][:1])
    return list(itertools.islice(turns, count))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
