"""Lists of documents whose text an earlier document has, made by hand."""

import dataclasses
import pathlib
from collections import Counter

from pipeline.exclusion import lists, origins
from tasks.reading import languages, sources
from tasks.reading.corpus import file_of


def search(folder: pathlib.Path, *corpora: str, output: str = "out") -> pathlib.Path:
    """Writes the list of all documents that have an earlier one's text but for case."""
    entries, of_list, seen, begin = [], [], {}, 0
    for name, spec in languages.specs(corpora, None, unnamed=True).items():
        corpus = sources.resolve(spec)
        origin = origins.of_corpus(corpus)
        rows = [
            row
            for piece in corpus.pieces
            for _, batch in sources.read(corpus, dataclasses.replace(piece, held_out=False))
            for row in batch.to_pylist()
        ]
        by_name = {file.name: file for file in origin.files}
        named = {row["place"].rpartition(":")[0] for row in rows} - by_name.keys()
        members = [by_name[file_of(each, by_name)].within(each) for each in sorted(named)]
        of_list.append(dataclasses.replace(origin, files=(*origin.files, *members)))
        number_of = {file.name: begin + at for at, file in enumerate(of_list[-1].files)}
        begin += len(number_of)
        ids = Counter(row["id"] for row in rows)
        for row in rows:
            twin, first = seen.setdefault(row["text"].lower(), (f"{name}:{row['id']}", row))
            if first is row:
                continue
            file, _, at = row["place"].rpartition(":")
            ((high, low),) = lists.id_digests([row["id"]]).tolist()
            place = lists.place_hash(row["place"]) if ids[row["id"]] > 1 else 0
            entries.append(
                {"high": high, "low": low, "place": place, "paragraph": lists.WHOLE, "reason": 0,
                 "twin": twin, "similarity": 1, "file": number_of[file], "row": int(at), "part": 0}
            )  # fmt: skip
    entries.sort(key=lambda each: (each["high"], each["low"], each["place"]))
    places = sum(each["place"] > 0 for each in entries)
    header = {
        **{"kind": lists.DUPLICATES, "reasons": [lists.EXACT], "corpus": " ".join(corpora)},
        "max_document_bytes": corpus.max_document_bytes,
        "counts": {"documents": len(entries), "paragraphs": 0, "places": places},
    }
    columns = {key: [each[key] for each in entries] for key in lists._OF_FILES.names}
    path = folder / output / "exclude.arrow"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        lists.write(file, header, [columns] if entries else [], of_list)
    return path
