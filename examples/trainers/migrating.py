"""Builds a cache of the texts in another loader's shards, and compares the tokens of both.

python examples/trainers/migrating.py LOADER SHARDS VOCABULARY OUTPUT

LOADER is streaming (MDS shards), litdata (chunks of `optimize`) or datasets (Parquet files). Its
samples have a column "text", and VOCABULARY is a SentencePiece model.
"""

import pathlib
import sys

import sentencepiece

import palimpsest
from tasks.adapters import CacheSource


def streaming(shards):
    from streaming import StreamingDataset

    return StreamingDataset(local=shards, shuffle=False, batch_size=1)


def litdata(shards):
    from litdata import StreamingDataset

    return StreamingDataset(shards, shuffle=False)


def datasets(shards):
    from datasets import load_dataset

    return load_dataset("parquet", data_dir=shards, split="train", streaming=True)


def main(loader, shards, vocabulary, output):
    read = {"streaming": streaming, "litdata": litdata, "datasets": datasets}[loader]
    pathlib.Path(output).mkdir(exist_ok=True)
    texts = (sample["text"] for sample in read(shards))
    corpus = palimpsest.write_corpus(texts, f"{output}/corpus.jsonl", validation=0)
    cache = palimpsest.build(
        corpus=corpus, vocabulary=vocabulary, name="mine", task="autoregressive_lm",
        cache_dir=f"{output}/cache",
    )  # fmt: skip
    windows = CacheSource(f"{cache.cache_dir}/{cache.task}", keep_tails=True)
    ours = [token for window in windows for token in window["tokens"].tolist()]
    pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
    theirs = [token for sample in read(shards) for token in pieces.encode(sample["text"])]
    print(f"{len(theirs):,} tokens of {loader}, {len(ours):,} of the cache")
    sys.exit("they differ" if ours != theirs else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
