"""A vocabulary class of a user's module: build, seqio, training, export, text in and out."""

import json
import sys

import numpy as np
import pytest

from pipeline import build, verify
from tasks import registry, vocabulary
from tasks.adapters import CacheSource
from tasks.cache.cache import Cache
from tasks.cache.manifest import CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies import registered
from tasks.vocabulary import SpecialIds
from tests.support import runs
from tests.support.processes import started
from trainer import export, generate, pretrain

pytestmark = pytest.mark.processes  # whole runs

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
MODULE = '''
from tasks import vocabulary
from tasks.vocabulary import SpecialIds


class Protein:
    """One id for each amino acid, after four special ones; "X" is unknown, "." cannot be."""

    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
    special = SpecialIds(pad=0, bos=1, eos=2, unk=3)
    control = (4,)
    version = "1"

    def encode(self, text):
        if "." in text:
            raise ValueError("no amino acid")
        places = {each: number for number, each in enumerate(self.pieces)}
        return [places.get(each, 3) for each in text]

    def decode(self, ids):
        return "".join(self.pieces[number] for number in ids)


vocabulary.register("protein", Protein)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def proteins():
    generator = np.random.default_rng(1)
    letters = np.array([*LETTERS])
    texts = ["".join(generator.choice(letters, size)) for size in range(20, 120)]
    return [*texts, "ACD.EF", "AX", "", "WY" * 40]


@pytest.fixture(scope="module", autouse=True)
def module(folder, proteins):
    (folder / "proteins.py").write_text(MODULE)
    lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(proteins)]
    (folder / "proteins.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Registers nothing beyond a test."""
    monkeypatch.setattr(registered, "_factories", {})
    sys.modules.pop("proteins", None)
    yield
    sys.modules.pop("proteins", None)


def flags(folder, cache="cache", **more):
    given = {"task": "span_corruption", "name": "proteins", "vocabulary": "protein"}
    given |= {"corpus": f"json:{folder}/proteins.jsonl", "cache_dir": f"{folder}/{cache}"}
    given |= {"task_module": "proteins", "extra_ids": 40, "row_tokens": 64, **more}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


@pytest.fixture(scope="module")
def cache(folder, module):
    build.main(flags(folder, workers=2, shard_bytes=2000))
    return f"{folder}/cache/proteins_span_corruption"


def test_rows_hold_the_ids_of_the_class(cache, folder, proteins):
    wanted = [5 + LETTERS.index(each) for text in proteins[:100] for each in text]
    wanted += [5, 3, *([5 + 18, 5 + 19] * 40)]
    source = CacheSource(cache, keep_tails=True, split="train", window_tokens=None)
    held = CacheSource(cache, keep_tails=True, split="validation", window_tokens=None)
    rows = [each[number]["tokens"] for each in (source, held) for number in range(len(each))]
    assert np.bincount(np.concatenate(rows)).tolist() == np.bincount(wanted).tolist()
    assert verify.main([f"--cache={cache}"]) == 0
    manifest = CacheManifest.load(cache)
    shards = [shard for split in manifest.splits.values() for shard in split]
    assert sum(each.dropped.get("protein cannot encode it: ValueError", 0) for each in shards) == 1
    record = manifest.plan.vocabulary
    assert (record.file, record.size, record.sentinels) == ("vocabulary.json", 65, 40)
    assert record.special == SpecialIds(pad=0, bos=1, eos=2, unk=3)
    # One worker writes the same bytes.
    build.main(flags(folder, "again", shard_bytes=2000))
    again = f"{folder}/again/proteins_span_corruption"
    assert CacheManifest.load(again).splits == manifest.splits


def test_ids_are_read_without_the_class(cache):
    code = (
        "import sys; from tasks.cache.cache import Cache; ids = Cache.open(sys.argv[1]).ids; "
        "print(ids.special.eos, ids.find('[MASK]'), ids.texts[5:8], ids.random_ids.tolist()[:2])"
    )
    made = started("-c", code, cache, check=True)
    assert made.stdout.strip() == "2 4 ['A', 'C', 'D'] [5, 6]"


@pytest.mark.torch
def test_trains_generates_fills_and_exports(cache, folder, capsys):
    run = f"{folder}/model"
    arguments = runs.pretrain(
        *(f"{folder}/cache", run, "--train_steps=2", "--evaluation.every_steps=0"),
        *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1"),
        **{"task": "proteins_span_corruption", "lengths": (64, 24)},
    )
    registered._factories.clear()  # the trainer needs no class
    assert pretrain.main(arguments[3:]) == 0
    asked = [f"--model_dir={run}", "--max_new_tokens=8"]
    with pytest.raises(UserError, match="class that no module registered: name the module"):
        generate.main([*asked, "--prompt=ACD"])
    sys.modules.pop("proteins", None)
    generate.main([*asked, "--prompt=ACD<extra_id_0>W", "--task_module=proteins"])
    capsys.readouterr()

    registered._factories.clear()
    assert export.main([f"--model_dir={run}", f"--output={folder}/exported"]) == 0
    said = capsys.readouterr().out
    assert "tokenizer  none: the vocabulary is a class in --task_module" in said
    names = files.list_names(f"{folder}/exported")
    assert "vocabulary.json" in names
    assert "tokenizer.json" not in names
    card = (folder / "exported" / "README.md").read_text()
    assert "There is no tokenizer" in card
    assert "AutoTokenizer" not in card


def own(**changes):
    """Registers and describes a class like Protein with changes."""
    registry.load("proteins")
    namespace: dict = {}
    exec(MODULE.replace('vocabulary.register("protein", Protein)', ""), namespace)
    vocabulary.register("protein", type("Changed", (namespace["Protein"],), changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"encode": lambda self, text: [6] * len(text)}, "ids_of_texts"),
        ({"version": "2"}, "version"),
        ({"special": SpecialIds(pad=0, bos=None, eos=2, unk=3)}, "special"),
    ],
)
def test_a_changed_class_is_noticed(cache, folder, changes, what):
    own(**changes)
    record = CacheManifest.load(cache).plan.vocabulary
    with pytest.raises(UserError, match=f"is not the one in .*: they differ in {what}"):
        vocabulary.of_cache(cache, record).encode(["A"])
    with pytest.raises(UserError, match=r"different plan .*vocabulary"):
        build.main(flags(folder, shard_bytes=2000))


class Counting:
    """Encodes every text differently each time."""

    pieces = ["p", "e", "u", *map(str, range(50))]
    calls = 0

    def encode(self, text):
        if len(text) > 20 and text.isalpha():
            Counting.calls += 1
            return [3 + Counting.calls % 50]
        return [3]

    def decode(self, ids):
        return ""


def refusing(**changes):
    return type("Bad", (Counting,), {"encode": lambda self, text: [3], **changes})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (refusing(pieces=[]), "class Bad, has pieces that are not"),
        (refusing(encode=lambda self, text: [99]), "encode returned the id 99 for the text"),
        (refusing(encode=lambda self, text: [-1]), "encode returned the id -1 for the text"),
        (refusing(encode=lambda self, text: "ab"), "encode returned str for the text"),
        (refusing(encode=lambda self, text: None), "encode returned NoneType for the text"),
        (refusing(sentinels=99), "its number of sentinels is 99"),
        (refusing(special=SpecialIds(pad=0, eos=77)), "has eos as id 77, but ids 0 to 52"),
        (refusing(special=(0, 1)), "that is not a tasks.vocabulary.SpecialIds"),
        (type("Bare", (), {"pieces": ["a"]}), "has no encode: it needs pieces"),
        (lambda: 1 / 0, "protein cannot be made: ZeroDivisionError: division by zero"),
    ],
)
def test_mistakes_are_one_line(made, message):
    vocabulary.register("protein", made)
    with pytest.raises(UserError, match=message) as raised:
        vocabulary.load("protein")
    assert "\n" not in str(raised.value)


def test_ids_that_change_fail_the_audit(folder, monkeypatch):
    registry.load("proteins")
    monkeypatch.setattr(sys.modules["proteins"], "Protein", Counting)
    vocabulary.register("protein", Counting)
    with pytest.raises(UserError, match="differently the second time"):
        build.main(flags(folder, "unstable"))


def test_unknown_names_are_one_line(folder):
    registry.load("proteins")
    with pytest.raises(UserError, match="registers; registered: "):
        vocabulary.load("proteinz")
    for name in ("bytes", "", "a/b"):
        with pytest.raises(ValueError, match="cannot be called"):
            vocabulary.register(name, Counting)


def test_a_class_may_lack_eos_and_have_sentinels_and_bytes():
    vocabulary.register(
        "own", refusing(special=SpecialIds(0, None, 2), pieces=["p", b"\xc3", "u", "a"])
    )
    loaded = vocabulary.load("own", 5)
    assert (loaded.special.eos, loaded.size, loaded.first_sentinel) == (4, 10, 5)
    assert loaded.ids.texts == ["", b"\xc3", "u", "a", ""]
    assert loaded.counts_agree()
    vocabulary.register("own", refusing(sentinels=3))
    loaded = vocabulary.load("own")
    assert (loaded.size, loaded.record.sentinels, loaded.ids.id_of("<extra_id_2>")) == (53, 3, 50)
    with pytest.raises(UserError, match="sentinels of its own: leave out --extra_ids=5"):
        vocabulary.load("own", 5)
    with pytest.raises(UserError, match="is a class of --task_module, but this needs"):
        _ = loaded.processor


def test_pairs_are_left_out_if_a_side_cannot_be_encoded(folder):
    lines = [{"id": "0", "a": "ACD", "b": "W.Y"}, {"id": "1", "a": "ACD", "b": "WY"}]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines * 20)))
    corpus = f"json:{folder}/pairs.jsonl?inputs=a&targets=b"
    more = {"corpus": corpus, "task": "supervised", "row_tokens": None, "max_quarantined": 0.9}
    build.main(flags(folder, "pairs", **more))
    splits = CacheManifest.load(f"{folder}/pairs/proteins_supervised").splits
    assert sum(sum(each.dropped.values()) for shards in splits.values() for each in shards) == 20
    assert Cache.open(f"{folder}/pairs/proteins_supervised").ids.size == 65
