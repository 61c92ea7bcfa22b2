"""Rows that trimming_vocabularies adds to tables of the core's tests."""

from tests.support.small_tokenizers import t5


def _workers(corpus, folder):
    corpus.with_name("second.txt").write_bytes(corpus.read_bytes())
    model = t5(folder / "t5", corpus.read_text().split()[:2000], 100)
    return ["palimpsest", "vocab", "trim", f"--vocabulary={model}", "--workers=2",
            f"--corpus=text:{folder}/*.txt", f"--output={folder}/cut"]  # fmt: skip


PARENTS = {"workers of a cut": _workers}
