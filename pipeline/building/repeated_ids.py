"""Ids that several documents of a cache have.

Such documents go to one split together, and a list of ids leaves all of them out.
"""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from tasks.cache.manifest import Plan, Shard, shard_file
from tasks.reading.corpus import is_place
from tasks.storage import files

# Most documents looked at, in shards spread over the cache: a second and 100 MB.
_MOST = 1 << 20


def found(folder: str, plan: Plan, shards: Mapping[tuple[str, int], Shard]) -> str:
    """Returns a line about repeated ids, or "" if there are none; ids made of places never repeat.

    A cache with more than about a million documents is sampled.
    """
    if not plan.file_names:  # the built-in corpus
        return ""
    keys = [key for key, shard in shards.items() if shard.documents]
    total = sum(shards[key].documents for key in keys)
    step = max(1, -(-total // _MOST))
    looked = [pa.nulls(0, pa.string())]
    for split, index in keys[::step]:
        name = shard_file(split, "documents", index, plan.shards[split])
        with files.open_read(files.join(folder, name)) as file:
            lineage = parquet.ParquetFile(file).read(["id", "document_offset"])
        ids = lineage.column("id").filter(
            pc.invert(lineage.column("document_offset").cast(pa.bool_()))
        )
        if len(looked) == 1 and is_place(ids[0].as_py(), plan.file_names):
            return ""
        looked += ids.chunks
    every = pa.chunked_array(looked)
    repeated = len(every) - pc.count_distinct(every).as_py()
    if not repeated:
        return ""
    counts = every.value_counts()
    number = counts.field("counts")
    most = counts[pc.index(number, pc.max(number)).as_py()].as_py()
    of = f"{len(every):,} documents" + (" looked at" if step > 1 else "")
    return (
        f"{repeated:,} of {of} have the id of another one, such as {most['values']!r}, which "
        f"{most['counts']:,} have: a list of ids leaves out all documents of an id"
    )
