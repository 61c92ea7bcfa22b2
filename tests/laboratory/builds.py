"""One random build: against the oracle, killed, extended, with documents taken down, and rerun."""

import argparse
import collections
import functools
import importlib
import itertools
import json
import pathlib
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import tokenizers

from pipeline.runners import local_workers
from tasks import annexes
from tests.laboratory import faults, oracle, texts
from tests.laboratory.build_command import MODULE, Build
from tests.laboratory.commands import Command, Difference, Done, draw_kills
from tests.laboratory.comparing import cache_differences
from tests.support import in_process, small_tokenizers

# The first shards of a large build are finished soon after its start, the last seconds later.
_LARGE_SHARD_BYTES, _LARGE_WORDS, _SMALL_FILES = 128 << 10, 400, 300
# Of the trials, this share runs Beam, and half of those with two workers; the others call the
# pieces' function in a random order, after a round through pickle.
_BEAM_SHARE = 0.08
_KINDS = ("t5", "t5_sentinels", "llama", "gemma", "gpt2", "llama3", "bert", "unigram", "bytes")
_EOS = {"t5": 1, "t5_sentinels": 1, "llama": 2, "gemma": 1, "bytes": 1}
_EOS_PIECES = {"gpt2": "<|endoftext|>", "llama3": "<|end_of_text|>"}
_EOS_PIECES |= {"bert": "[SEP]", "unigram": "</s>"}


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Makes the vocabularies of all trials; imports what they need, by building."""
    from vocab.train import add_sentinels

    importlib.import_module("pipeline.verification.cache")
    lines = small_tokenizers.documents(120)
    folder.mkdir()
    small_tokenizers.t5(folder / "t5", lines, 600, byte_fallback=True)
    model = (folder / "t5.model").read_bytes()
    (folder / "t5_sentinels.model").write_bytes(add_sentinels(model, 100))
    for kind in ("gpt2", "llama3", "bert", "unigram", "llama", "gemma"):
        small_tokenizers.KINDS[kind](folder / kind, lines)
    if flags.large:
        return
    for number in range(min(flags.count if flags.only is None else 1, 2 * len(_KINDS))):
        trial = Trial(flags, ~number, folder.parent, _KINDS[number % len(_KINDS)])
        trial.warm()
        trial.clean()


class Trial:
    """A drawn build; `run` raises a Difference."""

    def __init__(
        self, flags: argparse.Namespace, number: int, folder: pathlib.Path, kind: str = ""
    ):
        self.random = random.Random(f"{flags.seed} builds {number}")
        self.flags, self.is_large, self._number = flags, flags.large, number
        # How the files of a large corpus lie: as drawn, many and small, or by links.
        self._lies = ("as drawn", "small files", "links")[number % 3] if flags.large else ""
        self.folder, self._vocabularies = folder / str(number), folder / "shared"
        self.folder.mkdir()
        self._commands, self.said = itertools.count(1), list[str]()
        self.counts = collections.Counter[str]()
        self._kind = kind or self.random.choice(_KINDS)
        self._draw()

    def _draw(self) -> None:
        pick, chance = self.random.choice, self.random.random
        self._pairs = chance() < 0.2
        self._packing = "pairs" if self._pairs else pick(("concat", "best_fit"))
        self._separator = pick(("none", "eos"))
        self._row_tokens = pick((100, 568) if self.is_large else (7, 32, 100, 568))
        longest = pick((1000, 256 << 10) if self.is_large else (40, 150, 1000, 256 << 10))
        self._validation = pick((0, 0.01, 0.1, 0.3))
        few = self._pairs and chance() < 0.6
        filters = bool(annexes.entries("filters"))
        encode = oracle.encoder(self._vocabulary, self._kind == "t5_sentinels")
        self._rules = oracle.Rules(
            encode, longest, self._validation,
            min_words=filters * pick((0, 0, 2)), banned=filters * pick(("", "", "ba+d|3[.]14")),
            max_inputs=few * pick((0, 12, 40)), max_targets=few * pick((0, 4, 25)),
            too_long=pick(("quarantine", "cut", "split")) if self._pairs else "",
            keeps_empty_targets=self._pairs and chance() < 0.4,
        )  # fmt: skip
        self._is_pattern = chance() < 0.5
        self._languages = pick(([""], [""], [""], ["ro", "en"], ["x", "ro", "en"]))
        if self.is_large and self._number % 2 == 0:  # not every fault knows languages
            self._languages = [""]
        kinds = [self._draw_kind() for _ in self._languages]
        if self._is_pattern:
            kinds = kinds[:1] * len(kinds)
        if self.is_large:
            kinds = [self._of_large(kind) for kind in kinds]
        self._kinds = dict(zip(self._languages, kinds, strict=True))
        self._reads: dict[str, list[texts.Read]] = {each: [] for each in self._languages}
        self._numbers = itertools.count()
        self.lists: list[pathlib.Path] = []
        self._in_force = 0
        with_beam = chance() < _BEAM_SHARE and len(self._languages) == 1
        self._runner = pick(("one", "two")) if with_beam else ""
        self._parts = 0 if self._runner or self.is_large else pick((0, 0, 2, 3))
        self.shard_bytes = pick((500, 3000, 20_000))
        if self.is_large:
            self.shard_bytes, self._runner = _LARGE_SHARD_BYTES, ""
        self._objective = "supervised" if self._pairs else pick(("lm", "prefix_lm", "lm"))
        if self._kind == "t5" and not self._pairs and chance() < 0.7:
            self._objective = "span_corruption"

    def _draw_kind(self) -> texts.Kind:
        absent = {"csv", "tsv", "arrow", "wet"} - {*annexes.entries("formats")}
        return texts.draw_kind(
            self.random, self._pairs, absent, archives=bool(annexes.entries("archives"))
        )

    def _of_large(self, kind: texts.Kind) -> texts.Kind:
        # A file of this format has one document; a takedown by a search's list refuses equal ids.
        while kind.format == "file" or kind.ids == "repeated":
            kind = self._draw_kind()
        return kind._replace(longest=_LARGE_WORDS)

    @property
    def _vocabulary(self) -> str:
        of = "bytes" if self._kind == "bytes" else str(self._vocabularies / self._kind)
        return f"{of}.model" if self._kind.startswith("t5") else of

    @property
    def _end(self) -> int | None:
        if self._separator == "none" or self._pairs:
            return None
        if piece := _EOS_PIECES.get(self._kind):
            path = f"{self._vocabulary}/tokenizer.json"
            return tokenizers.Tokenizer.from_file(path).token_to_id(piece)
        return _EOS[self._kind]

    def words(self, side: str, *more: str) -> list[str]:
        rules, given = self._rules, self._kinds
        if self._is_pattern and self._languages != [""]:
            given = {"{language}": self._kinds[self._languages[0]]}
        words = [
            f"--corpus={f'{name}=' * (name.isalpha())}{self._spec(name or 'all', kind)}"
            for name, kind in given.items()
        ]
        words += ["--name=fuzz", f"--task={self._objective}", f"--vocabulary={self._vocabulary}"]
        words += [f"--cache_dir={self.folder / side}", f"--shard_bytes={self.shard_bytes}"]
        words += [f"--max_document_bytes={rules.longest}", "--max_quarantined=1", *more]
        words.append("--max_unknown=1")
        words += ["--extra_ids=100"] * (self._kind in ("t5", "bytes"))
        if rules.min_words:
            words.append(f"--filter=length?min_words={rules.min_words}")
        if rules.banned:
            words.append(f"--filter=regex?pattern={rules.banned}")
        if self._pairs:
            limits = {"max_inputs": rules.max_inputs, "max_targets": rules.max_targets}
            words += [f"--{name}={limit}" for name, limit in limits.items() if limit]
            words.append(f"--too_long={rules.too_long}")
            words += ["--empty_targets=keep"] * rules.keeps_empty_targets
        else:
            words += [f"--packing={self._packing}", f"--separator={self._separator}"]
            words.append(f"--row_tokens={self._row_tokens}")
        return [*words, *(["--workers=2"] if self._runner == "two" else [])]

    def _spec(self, name: str, kind: texts.Kind) -> str:
        options = "&".join([*kind.options, f"validation={self._validation}"])
        return f"{kind.reader}:{self.folder}/corpus/{name}/*{kind.ending}?{options}"

    @property
    def specs(self) -> list[str]:
        return [self._spec(name or "all", kind) for name, kind in self._kinds.items()]

    def _add_files(self) -> None:
        """Adds files to the corpus of every language."""
        for name, kind in self._kinds.items():
            folder = self.folder / "corpus" / (name or "all")
            folder.mkdir(parents=True, exist_ok=True)
            made: dict[str, list[texts.Read]] = {}
            for size in self._sizes():
                # An added file may come first in the alphabet; no two have the same name.
                file = f"{self.random.choice('abcz')}{next(self._numbers)}{kind.ending}"
                data, made[file] = texts.file_of(self.random, kind, file, size)
                path = folder / file
                if self._lies == "links":
                    path.symlink_to(self.folder / file)
                    path = self.folder / file
                path.write_bytes(data)
            for file in sorted(made):
                for read in made[file]:
                    some = texts.parts(read, self._rules.longest, kind.is_plain)
                    self._reads[name] += [read] if self._pairs else some

    def _sizes(self) -> list[int]:
        """Draws how many documents each of some more files has."""
        draw = self.random.randint
        if not self.is_large:
            return [draw(8, 40) for _ in range(draw(1, 4))]
        files_ = _SMALL_FILES if self._lies == "small files" else 4
        documents = self.flags.corpus_bytes // (450 * len(self._kinds) * files_)
        return [draw(documents // 2, 2 * documents) + 1 for _ in range(files_)]

    def build(
        self,
        side: str,
        *more: str,
        exclude: Sequence[str] | None = None,
        least: int = 1,
        prepare: Callable[[], object] | None = None,
    ) -> Build:
        """Returns a build into caches of their own, with some of the lists if none are given."""
        if exclude is None:
            exclude = self.excluding(self.random.randint(0, self._in_force))
        words = self.words(f"caches/{side}", *more, *exclude)
        if self.is_large:
            words.append(f"--workers={self.workers(least)}")
        return Build(self.folder / "caches" / side, words, self._log(), **self._how(prepare))

    def command(self, *words: str) -> Command:
        return Command(words, self._log(), **self._how())

    def _log(self) -> pathlib.Path:
        return self.folder / f"command-{next(self._commands)}.log"

    def workers(self, least: int = 1) -> int:
        low, high = self.flags.workers
        if least == 1 and self.random.random() < 0.5:
            return low
        return self.random.randint(max(low, least), max(high, least))

    def _how(self, prepare: Callable[[], object] | None = None) -> dict[str, Any]:
        """Returns how a command starts: in a fork, unless the build is large."""
        order = random.Random(f"{self.random.random()}")

        def in_order() -> None:
            if not self._runner and not self.is_large:
                local_workers.run = functools.partial(_in_random_order, order)
            if prepare:
                prepare()

        return {"fresh": self.is_large, "watched": self.folder / "caches", "prepare": in_order}

    def warm(self) -> None:
        """Builds in this process."""
        self._add_files()
        run = functools.partial(_in_random_order, self.random)
        with mock.patch.object(local_workers, "run", run):
            in_process.run(MODULE, *self.words("caches/a", "--workers=1"))
        for name in self.wanted():
            in_process.run(
                "pipeline.verify", f"--cache={self.folder}/caches/a/{name}", "--workers=1"
            )

    def run(self) -> str:
        """Runs the trial; returns what was tried, in words."""
        self._add_files()
        if self.random.random() < 0.3:
            self._rules = self._list_ids("from the start")
        if not self._is_buildable():
            return self._refused()
        plain = self._both("built")
        self._rerun()
        self._damage()
        self._add_token()
        # Of the faults of files, which take no time, a small build gets two.
        kinds = faults.EVERY if self.is_large else self.random.sample([*faults.OF_FILES], 2)
        for name in kinds:
            self.note(faults.EVERY[name](self) or name)
        extended = self.random.random() < 0.4
        if extended:
            if self._is_pattern and self._languages != [""] and self.random.random() < 0.5:
                self._kinds["added"], self._reads["added"] = self._kinds[self._languages[0]], []
            self._add_files()
            self._both("extended", "--extend")
        if self.is_large or self.random.random() < 0.5:
            self._take_down(extended)
        self._rerun()
        return f"{self.describe()}: {', '.join(self.said)} ({plain.seconds:.1f} s a build)"

    def note(self, what: str) -> None:
        self.said.append(what)
        self.counts[what] += 1

    def describe(self) -> str:
        kinds = {
            f"{kind.format}{kind.packing}{kind.archive} {kind.ids}" for kind in self._kinds.values()
        }
        what = [*sorted(kinds), self._kind, self._packing, self._separator, *[*self._kinds][1:]]
        how = [f"workers {self._runner}"] * bool(self._runner)
        return " ".join([*what, *how, *[f"{self._parts} parts"] * bool(self._parts)])

    def _refused(self) -> str:
        self.build("a", exclude=self.excluding()).refuse("empty corpus", "leaves no doc")
        return f"{self.describe()}: empty, refused"

    def wanted(self) -> dict[str, dict[str, oracle.Held]]:
        """Returns what the cache of each language must hold, by its name."""
        found = {}
        for language, reads in self._reads.items():
            name = f"fuzz_{language}_{self._objective}" if language else f"fuzz_{self._objective}"
            found[name] = oracle.expected(reads, self._rules)
        return found

    def excluding(self, without: int = 0) -> list[str]:
        """Returns the flag of the lists, without the first ones, which may be in force."""
        given = self.lists[without:]
        return [f"--exclude={','.join(map(str, given))}"] * bool(given)

    @property
    def splits_pairs(self) -> bool:
        return self._rules.too_long == "split"

    def _list_ids(self, when: str) -> oracle.Rules:
        """Lists some of the documents that are kept, if any; returns the rules with the list."""
        held = [each for of in self.wanted().values() for each in of.values()]
        names = sorted({each.id for one in held for each in one.kept})
        count = min(self.random.choice((1, 3, 12)), -(-len(names) // 3))
        # ID, of which there are parts, is all of them.
        some = [
            each.partition("#part")[0] if self.random.random() < 0.3 else each
            for each in self.random.sample(names, count)
        ]
        if not some:
            return self._rules
        some += ["no such document"] * (self.random.random() < 0.3)
        path = self.folder / f"ids-{len(self.lists)}.txt"
        path.write_text("\n".join(some) + "\n")
        self.lists.append(path)
        self.said.append(f"{len(some)} ids listed {when}")
        return self._rules._replace(listed=self._rules.listed | set(some))

    def _is_buildable(self) -> bool:
        return all(held["train"].kept for held in self.wanted().values())

    def _both(self, what: str, *more: str) -> Done:
        """Runs a command undisturbed on caches a, and killed on b; returns the undisturbed one."""
        exclude = self.excluding(self.random.randint(0, self._in_force))
        plain = self.build("a", *more, exclude=exclude).succeed()
        self.check("a")
        is_first = what == "built" and self.is_large
        left = self.flags.kills if is_first else self.random.choice((1, 1, 2, 3))
        while left > 0:
            share = plain._replace(events=plain.events // max(self._parts, 1))
            kills = draw_kills(self.random, share, min(left, 8))
            builds = [self.build("b", *more, *part, exclude=exclude) for part in self._shares()]
            killed = self.random.choice(builds)
            said = collections.Counter[str]()
            for build in builds:
                said += build.disturb(kills if build is killed else ())
            names = [str(kill) for kill in said.elements()]
            self.said.append(f"{what}, {' and '.join(names)}")
            self.counts.update(f"{what}, {name.split()[0]}" for name in names)
            self.counts["finished shards redone"] += is_first and killed.redone
            left -= len(kills)
            self.same("a", "b", f"{what} and killed ({', '.join(names)})")
            if left > 0:
                shutil.rmtree(killed.cache)
        self._in_force, self.seconds = len(self.lists), plain.seconds
        return plain

    def _shares(self) -> list[list[str]]:
        """Returns the flags of each build of a cache: of the whole, or of parts in any order."""
        parts = self.random.sample(range(self._parts), self._parts)
        return [[f"--part={number}/{self._parts}"] for number in parts] or [[]]

    def _damage(self) -> None:
        """Damages a compressed file: a build names it, or has the same documents."""
        packed = [
            (path, kind.packing)
            for name, kind in self._kinds.items()
            for path in sorted((self.folder / "corpus" / (name or "all")).iterdir())
            if kind.packing and kind.format != "wet"
        ]
        if not packed:
            return
        path, packing = self.random.choice(packed)
        before = path.read_bytes()
        path.write_bytes(texts.damaged(self.random, packing, before))
        build = self.build("d", exclude=self.excluding())
        done = build.run()
        if done.code == 0:
            self.check("d")
        elif done.code != 2 or path.name not in done.output.splitlines()[-1]:
            raise Difference(f"damaged {path.name}: code {done.code}, {done.output}")
        path.write_bytes(before)
        shutil.rmtree(build.cache, ignore_errors=True)
        self.note(f"{packing} damaged: code {done.code}")

    def _add_token(self) -> None:
        """Adds a token beside the vocabulary, as transformers does: the build refuses by name."""
        if self._kind == "bytes" or self.random.random() < 0.7:
            return
        given, folder = pathlib.Path(self._vocabulary), self.folder / "vocabulary"
        if given.is_dir():
            shutil.copytree(given, folder)
        else:
            folder.mkdir()
            shutil.copy(given, folder / "spiece.model")
        token = {"content": "<added>", "special": False}
        name, value = self.random.choice(
            (
                ("added_tokens.json", {"<added>": 99_999}),
                ("tokenizer_config.json", {"added_tokens_decoder": {"99999": token}}),
                ("special_tokens_map.json", {"additional_special_tokens": ["<added>"]}),
            )
        )
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | value))
        build = self.build("e", exclude=self.excluding())
        build.words = [f"--vocabulary={folder}" if "--vocabulary=" in each else each
                       for each in build.words]  # fmt: skip
        try:
            build.refuse("has the token <added>")
        except Difference as error:
            raise Difference(f"an added token in {name}: {error}") from error
        self.note("token added")

    def _take_down(self, extended: bool) -> None:
        before, self._rules = self._rules, self._list_ids("later")
        if not self._is_buildable():
            self._rules, self.lists = before, self.lists[:-1]
            return
        self._both("taken down")
        if not extended:
            self._in_force = 0
            self.build("c", exclude=self.excluding()).succeed()
            self.same("a", "c", "taken down and left out from the start", hidden=False)

    def _rerun(self) -> None:
        """The finished command again must do nothing; `pipeline.verify` must find no fault."""
        build, before = self.build("a"), self.folder / "before"
        shutil.copytree(build.cache, before)
        done = build.succeed()
        if done.output.count("nothing to do") != len(self._kinds):
            raise Difference(f"a finished build does something again: {done.output}")
        if changed := cache_differences(before, build.cache):
            raise Difference(f"a finished build changes {changed}")
        shutil.rmtree(before)
        self.verify("a")

    def verify(self, side: str) -> None:
        for name in self.wanted():
            words = [f"--cache={self.folder}/caches/{side}/{name}", "--workers=1"]
            self.command("pipeline.verify", *words, *self.excluding()).succeed()

    def check_accounts(self, side: str) -> None:
        """Checks that caches keep or leave out each text once, as those of the oracle do."""
        found = [oracle.ids(self.folder / "caches" / each / name)
                 for each in ("a", side) for name in self.wanted()]  # fmt: skip
        half = len(found) // 2
        if found[:half] != found[half:]:
            raise Difference(f"caches a and {side} account for other documents")

    def check(self, side: str) -> None:
        unknown = oracle.unknown(self._vocabulary)
        layout = oracle.Layout(self._packing, self._row_tokens, self._end, unknown)
        for name, held in self.wanted().items():
            oracle.check(self.folder / "caches" / side / name, held, layout)

    def same(self, one: str, other: str, what: str, hidden: bool = True) -> None:
        folders = [self.folder / "caches" / side for side in (one, other)]
        if names := cache_differences(*folders, hidden=hidden):
            raise Difference(f"{what}: caches {one} and {other} differ in {names}")

    def clean(self) -> None:
        shutil.rmtree(self.folder)


def _in_random_order(
    order: random.Random, function: Any, elements: Sequence[Any], *_: Any
) -> collections.Counter[str]:
    """Stands in for Beam's runner, which also pickles both."""
    function, shuffled = pickle.loads(pickle.dumps((function, list(elements))))
    order.shuffle(shuffled)
    return sum((function(each) for each in shuffled), collections.Counter())
