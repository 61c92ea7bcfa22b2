"""Measures one encoder on texts, in a process of its own and in any Python that has the encoder.

    python encoders.py ENCODER VOCABULARY FOLDER

Run by benchmarks.tokenize, with `ours` or the name of a package. For each FOLDER/TEXT.utf8, whose
documents end at FOLDER/TEXT.ends.npy, a new encoder encodes all batches twice in one thread; a slow
one encodes one in ten again. Prints a line of JSON and writes a checksum of each document's ids to
FOLDER/TEXT.ENCODER.VERSION.npy. Needs only NumPy and the encoder.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import time
import zlib

import numpy as np

BATCH = 256  # documents
# These keep no words in memory, so a second pass is like the first.
_SLOW = ("sentencepiece", "tokenizers")


def encoder(name, model):
    """Returns (prepare, encode, separate); only the second function is measured.

    They make the encoder's argument from bytes and ends of documents, encode it, and turn the
    result into a list with the ids of each document.
    """
    is_json = model.lstrip()[:1] == b"{"

    def strings(data, ends):
        return [data[begin:end].decode() for begin, end in zip([0, *ends], ends)]  # noqa: B905

    if name == "ours":
        import pyarrow as pa

        from pipeline.tokenizer import tokenize
        from tasks import vocabulary

        fast = tokenize.fast(vocabulary.from_bytes(model))

        def array(data, ends):
            offsets = pa.py_buffer(np.array([0, *ends], np.int64))
            return pa.LargeStringArray.from_buffers(len(ends), offsets, pa.py_buffer(data))

        return array, fast.encode, lambda found: np.split(found[0], np.cumsum(found[1])[:-1])
    if name == "sentencepiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        return strings, lambda texts: processor.encode(texts, num_threads=1), list
    if name == "tokenizers":
        import tokenizers

        made = tokenizers.Tokenizer.from_str(model.decode())
        fast = functools.partial(made.encode_batch_fast, add_special_tokens=False)
        return strings, fast, lambda found: [each.ids for each in found]
    if name == "gigatoken":
        import gigatoken

        kind = gigatoken.Tokenizer
        made = (kind.from_json if is_json else kind.from_sentencepiece)(model)
        # Faster than encode_batch, which makes an awkward array.
        return strings, lambda texts: [made.backend.encode(text) for text in texts], list
    import fastokens

    made = fastokens.Tokenizer.from_json_str(model.decode())

    def parts(found):
        ids, offsets = (np.frombuffer(*each) for each in zip(found, ("u4", "u8"), strict=True))
        return np.split(ids, offsets[1:-1])

    return strings, made.encode_batch_flat, parts


def measure(name, model, path, output):
    """Returns (MB/s of the first pass, MB/s of the second)."""
    data, ends = path.read_bytes(), np.load(path.with_suffix(".ends.npy"))
    prepare, encode, separate = encoder(name, model)
    speeds, sums = [], []
    for step in (1, 10 if name in _SLOW else 1):
        seconds, size = 0.0, 0
        for first in range(0, len(ends), BATCH * step):
            begin = int(ends[first - 1]) if first else 0
            some = ends[first : first + BATCH]
            texts = prepare(data[begin : some[-1]], (some - begin).tolist())
            start = time.process_time()
            found = encode(texts)
            seconds += time.process_time() - start
            size += int(some[-1]) - begin
            if not speeds:
                ids = (np.asarray(each, np.int32) for each in separate(found))
                sums += [zlib.crc32(each.tobytes()) for each in ids]
        speeds.append(size / 1e6 / seconds)
    np.save(output, np.array(sums, np.uint32))
    return speeds


def _most_memory():
    """Returns the most megabytes that the process held."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # the other number counts what its parent held when it forked
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main(name, vocabulary, folder):
    """Prints a line of JSON: version, megabytes of memory, speeds by text, why some are missing."""
    # One thread, as a worker has it.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    model, folder = pathlib.Path(vocabulary).read_bytes(), pathlib.Path(folder)
    version = "" if name == "ours" else importlib.metadata.version(name)
    found = {"version": version, "texts": {}, "why": ""}
    try:
        for path in sorted(folder.glob("*.utf8")):
            output = path.with_suffix(f".{name}.{version}.npy")
            found["texts"][path.stem] = measure(name, model, path, output)
    except Exception as error:  # encoders raise what they like for a vocabulary that they lack
        found["why"] = f"{type(error).__name__}: {error}"
    found["memory"] = _most_memory()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
