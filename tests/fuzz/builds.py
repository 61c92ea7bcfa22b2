"""One random build: against the oracle, killed, extended, with documents taken down, and rerun."""

import collections
import functools
import importlib
import itertools
import json
import pathlib
import pickle
import random
import shutil
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

import tokenizers

from pipeline.runners import local_workers
from tasks import annexes
from tasks.storage import files
from tests.faults.comparing import differing
from tests.fuzz import caches, texts
from tests.fuzz.forks import Command, Difference, Done, draw_kill
from tests.support import in_process, small_tokenizers

_MODULE = "pipeline.build"
_SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGINT,) * 3 + (signal.SIGTERM,)
_INTERRUPTED = 130
# Of the trials, this share runs Beam, and half of those with two workers; the others call the
# pieces' function in a random order, after a round through pickle.
_BEAM_SHARE = 0.08
_KINDS = ("t5", "t5_sentinels", "llama", "gemma", "gpt2", "llama3", "bert", "unigram", "bytes")
_EOS = {"t5": 1, "t5_sentinels": 1, "llama": 2, "gemma": 1, "bytes": 1}
_EOS_PIECES = {"gpt2": "<|endoftext|>", "llama3": "<|end_of_text|>"}
_EOS_PIECES |= {"bert": "[SEP]", "unigram": "</s>"}


def warm(folder: pathlib.Path, count: int) -> None:
    """Makes the vocabularies of all trials; imports what `count` of them need, by building."""
    from vocab.train import add_sentinels

    importlib.import_module("pipeline.verification.cache")
    lines = small_tokenizers.documents(120)
    folder.mkdir()
    small_tokenizers.t5(folder / "t5", lines, 600, byte_fallback=True)
    model = (folder / "t5.model").read_bytes()
    (folder / "t5_sentinels.model").write_bytes(add_sentinels(model, 100))
    for kind in ("gpt2", "llama3", "bert", "unigram", "llama", "gemma"):
        small_tokenizers.KINDS[kind](folder / kind, lines)
    for number in range(min(count, 2 * len(_KINDS))):
        trial = Trial(0, ~number, folder.parent, _KINDS[number % len(_KINDS)])
        trial.warm()
        trial.clean()


class Trial:
    """A drawn build; `run` raises a Difference."""

    def __init__(self, seed: int, number: int, folder: pathlib.Path, kind: str = ""):
        self.random = random.Random(f"{seed} builds {number}")
        self._folder, self._vocabularies = folder / str(number), folder / "shared"
        self._folder.mkdir()
        self._commands, self.said = 0, list[str]()
        self._kind = kind or self.random.choice(_KINDS)
        self._draw()

    def _draw(self) -> None:
        pick, chance = self.random.choice, self.random.random
        self._pairs = chance() < 0.2
        self._packing = "pairs" if self._pairs else pick(("concat", "best_fit"))
        self._separator = pick(("none", "eos"))
        self._row_tokens = pick((7, 32, 100, 568))
        longest = pick((40, 150, 1000, 256 << 10))
        self._validation = pick((0, 0.01, 0.1, 0.3))
        few = self._pairs and chance() < 0.6
        filters = "filter" in annexes.entries("flags.build")
        encode = caches.encoder(self._vocabulary, self._kind == "t5_sentinels")
        self._rules = caches.Rules(
            encode, longest, self._validation,
            min_words=filters * pick((0, 0, 2)), banned=filters * pick(("", "", "ba+d|3[.]14")),
            max_inputs=few * pick((0, 12, 40)), max_targets=few * pick((0, 4, 25)),
            too_long=pick(("quarantine", "cut", "split")) if self._pairs else "",
            keeps_empty_targets=self._pairs and chance() < 0.4,
        )  # fmt: skip
        self._is_pattern = chance() < 0.5
        self._languages = pick(([""], [""], [""], ["ro", "en"], ["x", "ro", "en"]))
        kinds = [texts.draw_kind(self.random, self._pairs) for _ in self._languages]
        if self._is_pattern:
            kinds = kinds[:1] * len(kinds)
        self._kinds = dict(zip(self._languages, kinds, strict=True))
        self._reads: dict[str, list[texts.Read]] = {each: [] for each in self._languages}
        self._numbers = itertools.count()
        self._lists: list[pathlib.Path] = []
        self._in_force = 0
        with_beam = chance() < _BEAM_SHARE and len(self._languages) == 1
        self._runner = pick(("one", "two")) if with_beam else ""
        self._shard_bytes = pick((500, 3000, 20_000))
        self._objective = "supervised" if self._pairs else pick(("lm", "prefix_lm", "lm"))
        if self._kind == "t5" and not self._pairs and chance() < 0.7:
            self._objective = "span_corruption"

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
        words += [f"--cache_dir={self._folder / side}", f"--shard_bytes={self._shard_bytes}"]
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
        return f"{kind.reader}:{self._folder}/corpus/{name}/*{kind.ending}?{options}"

    def _add_files(self) -> None:
        """Adds files to the corpus of every language."""
        for name, kind in self._kinds.items():
            folder = self._folder / "corpus" / (name or "all")
            folder.mkdir(parents=True, exist_ok=True)
            made: dict[str, list[texts.Read]] = {}
            for _ in range(self.random.randint(1, 4)):
                # An added file may come first in the alphabet; no two have the same name.
                file = f"{self.random.choice('abcz')}{next(self._numbers)}{kind.ending}"
                count = self.random.randint(8, 40)
                data, made[file] = texts.file_of(self.random, kind, file, count)
                (folder / file).write_bytes(data)
            for file in sorted(made):
                for read in made[file]:
                    some = texts.parts(read, self._rules.longest, kind.is_plain)
                    self._reads[name] += [read] if self._pairs else some

    def _command(self) -> Command:
        self._commands += 1
        order = random.Random(f"{self.random.random()}")

        def prepare() -> None:
            if not self._runner:
                local_workers.run = functools.partial(_in_random_order, order)

        log = self._folder / f"command-{self._commands}.log"
        return Command(self._folder / "caches", log, prepare)

    def warm(self) -> None:
        """Builds in this process."""
        self._add_files()
        run = functools.partial(_in_random_order, self.random)
        with mock.patch.object(local_workers, "run", run):
            in_process.run(_MODULE, *self.words("caches/a", "--workers=1"))
        for name in self.wanted():
            in_process.run(
                "pipeline.verify", f"--cache={self._folder}/caches/a/{name}", "--workers=1"
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
        extended = self.random.random() < 0.4
        if extended:
            if self._is_pattern and self._languages != [""] and self.random.random() < 0.5:
                self._kinds["added"], self._reads["added"] = self._kinds[self._languages[0]], []
            self._add_files()
            if not self._is_buildable():
                return f"{self.describe()}: {', '.join(self.said)}, an empty language"
            self._both("extended", "--extend")
        if self.random.random() < 0.5:
            self._take_down(extended)
        self._rerun()
        return f"{self.describe()}: {', '.join(self.said)} ({plain.seconds:.1f} s a build)"

    def describe(self) -> str:
        kinds = {
            f"{kind.format}{kind.packing}{kind.archive} {kind.ids}" for kind in self._kinds.values()
        }
        what = [*sorted(kinds), self._kind, self._packing, self._separator, *[*self._kinds][1:]]
        return " ".join([*what, f"Beam {self._runner}" if self._runner else ""]).strip()

    def _refused(self) -> str:
        done = self._command().run(_MODULE, self.words("caches/a", *self._excluding()))
        if done.code != 2 or not ("empty corpus" in done.output or "leaves no doc" in done.output):
            raise Difference(f"a corpus without documents: code {done.code}, {done.output}")
        return f"{self.describe()}: empty, refused"

    def wanted(self) -> dict[str, dict[str, caches.Held]]:
        """Returns what the cache of each language must hold, by its name."""
        found = {}
        for language, reads in self._reads.items():
            name = f"fuzz_{language}_{self._objective}" if language else f"fuzz_{self._objective}"
            found[name] = caches.expected(reads, self._rules)
        return found

    def _excluding(self) -> list[str]:
        """Returns the flag of the lists, with or without some of those in force."""
        given = self._lists[self.random.randint(0, self._in_force) :]
        return [f"--exclude={','.join(map(str, given))}"] * bool(given)

    def _list_ids(self, when: str) -> caches.Rules:
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
        path = self._folder / f"ids-{len(self._lists)}.txt"
        path.write_text("\n".join(some) + "\n")
        self._lists.append(path)
        self.said.append(f"{len(some)} ids listed {when}")
        return self._rules._replace(listed=self._rules.listed | set(some))

    def _is_buildable(self) -> bool:
        return all(held["train"].kept for held in self.wanted().values())

    def _both(self, what: str, *more: str) -> Done:
        """Runs a command undisturbed on caches a, and killed on b; returns the undisturbed one."""
        words = (*more, *self._excluding())
        plain = self._command().succeed(_MODULE, self.words("caches/a", *words))
        self.check("a")
        count = self.random.choice((1, 1, 2, 3))
        kills = [draw_kill(self.random, plain, _SIGNALS, each) for each in range(count)]
        said = self._command().disturb(
            _MODULE, self.words("caches/b", *words), kills, (_INTERRUPTED,)
        )
        self._in_force = len(self._lists)
        self.said.append(f"{what}, {' and '.join(said)}")
        self._same("a", "b", f"{what} and killed ({', '.join(said)})")
        return plain

    def _damage(self) -> None:
        """Damages a compressed file: a build names it, or has the same documents."""
        packed = [
            (path, kind.packing)
            for name, kind in self._kinds.items()
            for path in sorted((self._folder / "corpus" / (name or "all")).iterdir())
            if kind.packing and kind.format != "wet"
        ]
        if not packed:
            return
        path, packing = self.random.choice(packed)
        before = path.read_bytes()
        path.write_bytes(texts.damaged(self.random, packing, before))
        done = self._command().run(_MODULE, self.words("caches/d", *self._excluding()))
        if done.code == 0:
            self.check("d")
        elif done.code != 2 or path.name not in done.output.splitlines()[-1]:
            raise Difference(f"damaged {path.name}: code {done.code}, {done.output}")
        path.write_bytes(before)
        shutil.rmtree(self._folder / "caches/d", ignore_errors=True)
        self.said.append(f"{packing} damaged: code {done.code}")

    def _add_token(self) -> None:
        """Adds a token beside the vocabulary, as transformers does: the build refuses by name."""
        if self._kind == "bytes" or self.random.random() < 0.7:
            return
        given, folder = pathlib.Path(self._vocabulary), self._folder / "vocabulary"
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
        words = self.words("caches/e", *self._excluding())
        words = [f"--vocabulary={folder}" if "--vocabulary=" in each else each for each in words]
        done = self._command().run(_MODULE, words)
        if done.code != 2 or "has the token <added>" not in done.output.splitlines()[-1]:
            raise Difference(f"an added token in {name}: code {done.code}, {done.output}")
        self.said.append("token added")

    def _take_down(self, extended: bool) -> None:
        before, self._rules = self._rules, self._list_ids("later")
        if not self._is_buildable():
            self._rules, self._lists = before, self._lists[:-1]
            return
        self._both("taken down")
        if not extended:
            self._in_force = 0
            words = self.words("caches/c", *self._excluding())
            self._command().succeed(_MODULE, words)
            self._same("a", "c", "taken down and left out from the start", hidden=False)

    def _rerun(self) -> None:
        """The finished command again must do nothing; `pipeline.verify` must find no fault."""
        before = _checksums(self._folder / "caches/a")
        done = self._command().succeed(_MODULE, self.words("caches/a", *self._excluding()))
        if done.output.count("nothing to do") != len(self._kinds):
            raise Difference(f"a finished build does something again: {done.output}")
        if changed := differing(before, _checksums(self._folder / "caches/a")):
            raise Difference(f"a finished build changes {changed}")
        for name in self.wanted():
            words = [f"--cache={self._folder}/caches/a/{name}", "--workers=1", *self._excluding()]
            self._command().succeed("pipeline.verify", words)

    def check(self, side: str) -> None:
        unknown = caches.unknown(self._vocabulary)
        layout = caches.Layout(self._packing, self._row_tokens, self._end, unknown)
        for name, held in self.wanted().items():
            caches.check(self._folder / "caches" / side / name, held, layout)

    def _same(self, one: str, other: str, what: str, hidden: bool = True) -> None:
        found = [_checksums(self._folder / "caches" / side, hidden) for side in (one, other)]
        if names := differing(*found):
            raise Difference(f"{what}: caches {one} and {other} differ in {names}")

    def clean(self) -> None:
        shutil.rmtree(self._folder)


def _in_random_order(
    order: random.Random, function: Any, elements: Sequence[Any], *_: Any
) -> collections.Counter[str]:
    """Stands in for Beam's runner, which also pickles both."""
    function, shuffled = pickle.loads(pickle.dumps((function, list(elements))))
    order.shuffle(shuffled)
    return sum((function(each) for each in shuffled), collections.Counter())


def _checksums(folder: pathlib.Path, hidden: bool = True) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): files.sha256(str(path))
        for path in folder.rglob("*")
        if path.is_file() and (hidden or "/." not in f"/{path.relative_to(folder)}")
    }
