"""Receipts of shards, which show whether a shard is finished, even during a build.

A receipt is written last. A shard is finished if its receipt exists and every file listed there has
the recorded size and checksum; anything else that a killed build left behind is redone.
"""

from collections.abc import Mapping

from tasks.cache.manifest import Plan, Shard, shard_file, shard_files, shard_from_dict
from tasks.storage import files
from tasks.terminal.command_line import UserError


def read_receipt(path: str) -> Shard | None:
    """Returns the shard of a receipt, or None if the receipt is missing or damaged."""
    try:
        return shard_from_dict(files.read_json(path))
    except (FileNotFoundError, UserError):
        return None


def finished(
    folder: str, plan: Plan, split: str, index: int, sizes: Mapping[str, int], hashes: bool = False
) -> Shard | None:
    """Returns the shard's receipt, or None if the shard is missing, truncated or damaged.

    `sizes` is from `files.list_sizes`. `hashes` also compares checksums if the cache is local:
    object stores keep their own, and hashing a remote cache means downloading it.
    """
    count = plan.shards[split]
    receipt = shard_file(split, "receipt", index, count)
    if receipt not in sizes:
        return None
    shard = read_receipt(files.join(folder, receipt))
    if shard is None or set(shard.files) != shard_files(split, index, count, bool(shard.dropped)):
        return None
    for name, entry in shard.files.items():
        if sizes.get(name) != entry.bytes:
            return None
        if hashes and not files.is_remote(folder):
            try:
                if files.sha256(files.join(folder, name)) != entry.sha256:
                    return None
            except FileNotFoundError:
                return None
    return shard
