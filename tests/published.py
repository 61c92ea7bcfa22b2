"""A cache whose shards a test publishes one by one, as a build finishes them."""

import pathlib
import shutil

from tasks.cache.manifest import PLAN, PLAN_MARK, SHARD_KINDS, CacheManifest, shard_file


class Published:
    """Copies a finished cache file by file into `folder`, beginning with what a build begins with."""

    def __init__(self, source: pathlib.Path, folder: pathlib.Path, plan: bool = True):
        self.source, self.folder = source, folder
        self.manifest = CacheManifest.load(str(source))
        folder.mkdir(parents=True, exist_ok=True)
        if plan:
            self.plan()

    def plan(self) -> None:
        names = [path.name for path in self.source.glob(f"{PLAN_MARK}*")]
        for name in [*names, PLAN, self.manifest.plan.vocabulary.file_name]:
            shutil.copy(self.source / name, self.folder / name)

    def shards(self, split: str, *numbers: int) -> None:
        for number in numbers:
            for kind in SHARD_KINDS:
                path = self.source / shard_file(split, kind, number, self.count(split))
                if path.exists():
                    shutil.copy(path, self.folder / path.name)

    def count(self, split: str) -> int:
        return self.manifest.plan.shards[split]

    def finish(self) -> None:
        for path in sorted(self.source.iterdir(), key=lambda path: path.name == "COMPLETED"):
            if path.is_file() and not path.name.startswith(".lock"):
                shutil.copy(path, self.folder / path.name)
