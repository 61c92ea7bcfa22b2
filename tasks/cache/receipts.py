"""Receipts of shards, which show whether a shard is finished, even during a build.

A receipt is written last. It names the plan under which its shard was written, so that a shard of
another plan, from a build that went on after a takedown, is never taken for one of this plan. A
shard is finished if its receipt exists, names the folder's plan, and every file listed there has
the recorded size and checksum; anything else is redone.
"""

import dataclasses
from collections.abc import Collection, Mapping

from tasks.cache.manifest import Plan, Shard, as_json, shard_file, shard_files, shard_from_dict
from tasks.storage import files
from tasks.terminal.command_line import UserError

_PLAN = "plan"


@dataclasses.dataclass(frozen=True)
class Receipt:
    """A finished shard, and the fingerprint of its plan; "" in receipts of version 0.2.0."""

    shard: Shard
    plan: str

    def fits(self, plan: Plan) -> bool:
        """Returns whether the shard has the bytes that `plan` determines.

        A receipt without a plan fits one without exclude lists: lists are never taken away, and
        all other plans of a folder give the same bytes to a shard of the same number.
        """
        return self.plan == plan.fingerprint or not (self.plan or plan.exclude)


def write_receipt(
    path: str, shard: Shard, fingerprint: str, guard: files.Guard | None = None
) -> None:
    files.write_json(path, {**as_json(shard), _PLAN: fingerprint}, guard)


def read_receipt(path: str) -> Receipt | None:
    """Returns the receipt, or None if it is missing or damaged."""
    try:
        value = files.read_json(path)
        plan = value.pop(_PLAN, "") if isinstance(value, dict) else ""
        return Receipt(shard_from_dict(value), plan)
    except (FileNotFoundError, UserError):
        return None


def finished(
    folder: str,
    plan: Plan,
    split: str,
    index: int,
    sizes: Mapping[str, int],
    hashes: bool = False,
    others: Collection[str] = (),
) -> Shard | None:
    """Returns the shard of the receipt, or None if it is missing, damaged or of another plan.

    `sizes` is from `files.list_sizes`. `hashes` also compares checksums if the cache is local:
    object stores keep their own, and hashing a remote cache means downloading it. Receipts that
    name one of the plans `others` are accepted, too.
    """
    count = plan.shards[split]
    name = shard_file(split, "receipt", index, count)
    if name not in sizes:
        return None
    receipt = read_receipt(files.join(folder, name))
    if receipt is None or not (receipt.fits(plan) or receipt.plan in others):
        return None
    shard = receipt.shard
    if set(shard.files) != shard_files(split, index, count, bool(shard.dropped)):
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
