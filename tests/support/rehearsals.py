"""Inputs of the recipes of the tree: data sets for a local Hub, and folders of this machine."""

import contextlib
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator

from tests.support import small_tokenizers
from tests.support.processes import ROOT
from tests.support.servers.hub import HubServer
from vocab.train import add_sentinels

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
# Tasks of the tree name these.
_OF_TASKS = ("allenai/c4:en", "dumitrescustefan/rlm:")
_SPEC = re.compile(r"hf:([\w.-]+/[\w.-]+):?([^?]*)(?:\?column=(\w+))?")


def data_sets(folder: pathlib.Path) -> None:
    """Writes the data sets that recipes of the tree read, below OWNER/NAME/CONFIGURATION.

    Each language has other documents.
    """
    texts = small_tokenizers.documents(10_000)
    found: dict[str, dict[str, str]] = {}
    for spec in {f"hf:{each}" for each in _OF_TASKS} | set(_specs()):
        name, config, column = _SPEC.fullmatch(spec).groups()
        found.setdefault(name, {})[config or "default"] = column or "text"
    for name, configs in found.items():
        place = folder / name
        lines = ["---", "configs:"]
        for number, (config, column) in enumerate(sorted(configs.items())):
            lines += [f"- config_name: {config}", f"  data_files: {config}/*.jsonl"]
            (place / config).mkdir(parents=True)
            rows = ({column: text} for text in texts[number::30] + texts[:400])
            write(place / config / "train.jsonl", rows)
        (place / "README.md").write_text("\n".join([*lines, "---", ""]))


def _specs() -> Iterator[str]:
    """Yields the SPECs of the Hub in the recipes of the tree, one for each language."""
    for path in RECIPES:
        whole = tomllib.loads(path.read_text())
        for table in [
            *whole.values(),
            *(inner for each in whole.values() for inner in each.values()),
        ]:
            spec = table.get("corpus", "") if isinstance(table, dict) else ""
            if isinstance(spec, str) and spec.startswith("hf:"):
                languages = table.get("languages", [""])
                yield from (spec.replace("{language}", each) for each in languages)


def write(path: pathlib.Path, rows: object) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def folders(place: pathlib.Path) -> None:
    """Writes the folders and files of this machine that recipes of the tree read."""
    texts = small_tokenizers.documents(1200)
    for name in ("texts/a", "news", "before/vocabulary"):
        (place / name).mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / f"texts/a/{number}.txt").write_text(text)
    write(place / "news" / "a.jsonl", ({"text": text} for text in texts))
    (place / "takedown.txt").write_text("a.jsonl:7\na.jsonl:8\n")
    transformers_t5(place / "mt5-base", "mt5", sentinels=True)
    transformers_t5(place / "t5-v1_1-base", "t5", sentinels=False)
    model = (place / "mt5-base" / "spiece.model").read_bytes()
    (place / "before/vocabulary/sentencepiece.model").write_bytes(model)


def transformers_t5(folder: pathlib.Path, kind: str, sentinels: bool, width: int = 96) -> None:
    """Writes a random T5 1.1 of transformers, larger than a rehearsal's, and a tokenizer."""
    import transformers

    folder.mkdir()
    lines = small_tokenizers.documents(200)
    small_tokenizers.t5(folder / "spiece", lines, 800)
    (folder / "spiece.vocab").unlink()
    path = folder / "spiece.model"
    if sentinels:
        path.write_bytes(add_sentinels(path.read_bytes(), 100))
    prefix = {"mt5": "MT5", "t5": "T5"}[kind]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=1024, d_model=width, d_kv=32, d_ff=256, num_layers=3, num_heads=6,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    model.save_pretrained(folder)


def variables() -> dict[str, str]:
    """Returns the environment of processes that run this clone, without settings of a Hub.

    They compile as for users: these runs are longer than their compilation.
    """
    of_tests = ("HF_", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@contextlib.contextmanager
def hub(folder: pathlib.Path, home: pathlib.Path) -> Iterator[dict[str, str]]:
    """Yields the environment of processes whose Hub has the data sets of a folder."""
    with HubServer(folder, access="public", several=True) as server:
        yield {
            **variables(),
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PALIMPSEST_RETRY_DELAY": "0.01",
        }
