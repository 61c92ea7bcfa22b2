"""Learns pieces from word counts with SentencePiece's trainer, in a separate process."""

import io
import os
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks import vocabulary
from tasks.terminal.child import end_at_once_with
from tasks.terminal.command_line import UserError
from tasks.terminal.interrupt import shielded
from tasks.terminal.processes import Spawn
from vocab import unigram_seeds
from vocab.count import Counts
from vocab.word_splitter import LONGEST_WORD

# SentencePiece's floating-point sums depend on the number of threads, so the number is fixed, and
# large enough for a workstation.
_THREADS = 16

# Upper bounds on memory for SentencePiece and for making seeds. Measured on 1.7 to 5 MB of words
# (Latin syllables, Han, and strings of 4 letters): 230 MB for interpreter, seeds and threads, 70
# bytes per byte of words and 400 per word; rounded up.
_FIXED_BYTES = 500_000_000
_BYTES_PER_WORD = 500
_BYTES_PER_BYTE = 100


def limits(memory_bytes: int) -> tuple[int, int]:
    room = max(memory_bytes - _FIXED_BYTES, memory_bytes // 8) // 2
    return room // _BYTES_PER_BYTE, room // _BYTES_PER_WORD


def learn(settings: Mapping[str, Any], counts: Counts, symbols: int = 0) -> bytes:
    """Returns a SentencePiece model with T5's ids, learned from `counts`, without a normaliser.

    `symbols` is the user's vocab_size minus the one in `settings`. A child process trains,
    because SentencePiece holds the interpreter lock, writes to stderr, and exits on unexpected
    input.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "words.tsv")
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for start in range(0, len(counts.words), 100_000):
                words = counts.words[start : start + 100_000].to_pylist()
                numbers = counts.counts[start : start + 100_000].tolist()
                file.writelines(
                    f"{word}\t{number}\n" for word, number in zip(words, numbers, strict=True)
                )
        context = Spawn()
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(
            target=_learn_in_child, args=(os.getpid(), sender, path, settings), daemon=True
        )
        with shielded():
            child.start()
        sender.close()
        try:
            model, reason = receiver.recv()
        except EOFError:
            model, reason = b"", "its process died; if memory ran out, lower --memory_bytes"
        finally:
            child.terminate()
            child.join()
    if reason:
        raise UserError(f"SentencePiece cannot make this vocabulary: {_advice(reason, symbols)}")
    return model


def _advice(reason: str, symbols: int) -> str:
    """Returns SentencePiece's reason, and a possible size if the size was wrong."""
    # SentencePiece's own advice, a lower character_coverage, mostly needs values that no vocabulary
    # should have. It neither counts the symbols nor knows our flags.
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        least = int(found[1]) + symbols
        return (
            f"the characters of the corpus and the special pieces take {least:,} pieces: give "
            f"--vocab_size={least} or more"
        )
    if found := re.search(r"Vocabulary size too high .* value <= (\d+)", reason):
        most = int(found[1]) + symbols
        return f"the corpus yields at most {most:,} pieces: give --vocab_size={most} or less"
    return reason


def _learn_in_child(parent: int, sender: Any, path: str, settings: Mapping[str, Any]) -> None:
    """Sends (model, reason for failure) through `sender`; one of the two is empty."""
    end_at_once_with(parent)
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 2)
    own: dict[str, Any] = {}
    if settings["model_type"] == "unigram":
        longest = settings["max_sentencepiece_length"]
        own = {
            "seed_sentencepieces_file": _write_seeds(path, longest),
            # Room for all seeds and for the single characters, which SentencePiece adds itself.
            "seed_sentencepiece_size": 2 * unigram_seeds.SEEDS,
        }
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=path,
            input_format="tsv",
            model_writer=model,
            **settings,
            **own,
            # The words are already normalised, and start with ▁ if they follow a space.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=8 * LONGEST_WORD,
            pad_id=vocabulary.PAD_ID,
            eos_id=vocabulary.EOS_ID,
            unk_id=vocabulary.UNK_ID,
            bos_id=-1,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # The format is "Internal: src/file.cc(1) [condition] readable message".
        reason = re.sub(r"^.*?\.cc\(\d+\) \[.*?\] (?=\S)", "", str(error)) or "no reason given"
        sender.send((b"", reason))
        return
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    # Removes the paths of this run's temporary files; SentencePiece 0.2.1's Python package does not
    # know the field that holds the seeds' path.
    proto.trainer_spec.DiscardUnknownFields()
    for name in ("input", "input_format"):
        proto.trainer_spec.ClearField(name)
    sender.send((proto.SerializeToString(deterministic=True), ""))


def _write_seeds(path: str, longest: int) -> str:
    """Writes seed pieces for the words in the file `path`; returns the path of the seeds."""
    words: list[str] = []
    counts: list[int] = []
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            word, _, count = line.rpartition("\t")
            words.append(word)
            counts.append(int(count))
    seeds_path = f"{path}.seeds"
    with open(seeds_path, "w", encoding="utf-8", newline="\n") as file:
        for piece, total in unigram_seeds.seed_pieces(words, np.array(counts, np.int64), longest):
            file.write(f"{piece}\t{total}\n")
    return seeds_path
