"""Texts that the vocabulary cannot spell are counted, named, and refused above a limit."""

import json

import pytest

from pipeline import build
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tests.support import small_tokenizers

TEXTS = [f"the {colour} house number {n} stands near the gate" for n in range(40)
         for colour in ("red", "old")]  # fmt: skip


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """Returns the path of a vocabulary that spells small letters and digits alone."""
    return small_tokenizers.t5(tmp_path_factory.mktemp("english") / "english", TEXTS, 60)


def run(tmp_path, english, texts, *more, task="lm"):
    path = tmp_path / "a.jsonl"
    rows = [{"text": text} if isinstance(text, str) else text for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = f"json:{path}?validation=0" + "&inputs=q&targets=a" * (task == "supervised")
    build.main([f"--task={task}", "--name=mine", f"--corpus={corpus}", f"--vocabulary={english}",
                "--extra_ids=0", f"--cache_dir={tmp_path}/cache", *more])  # fmt: skip
    return CacheManifest.load(f"{tmp_path}/cache/mine_{task}")


def test_a_vocabulary_that_spells_all_says_nothing(tmp_path, english, capsys):
    manifest = run(tmp_path, english, TEXTS)
    assert manifest.total("train", "unknown_tokens") == 0
    assert "unknown" not in capsys.readouterr().out


def test_a_few_unknown_tokens_are_counted_and_named(tmp_path, english, capsys):
    manifest = run(tmp_path, english, [*TEXTS, "{a} {b}\nQ " * 8])
    unknown = manifest.total("train", "unknown_tokens")
    out = capsys.readouterr().out
    assert unknown == 8 * 5
    share = unknown / manifest.total("train", "text_tokens")
    assert [line.split() for line in out.splitlines() if line.startswith("unknown tokens")] == [
        ["unknown", "tokens", f"{share:.2%}"]
    ]
    assert f"warning: {share:.1%} of the tokens are unknown" in out
    assert "cannot spell '{', '}', 'Q', line ends, which become spaces" in out


@pytest.mark.parametrize("flag", ["--dry_run", "--workers=1"])
def test_a_large_share_is_refused(tmp_path, english, flag):
    texts = ["красный дом стоит у ворот"] * 9
    with pytest.raises(UserError, match=r"100.0% of the documents hold .* spell 'о', .*max_"):
        run(tmp_path, english, texts, flag)
    assert not (tmp_path / "cache" / "mine_lm" / "COMPLETED").exists()
    run(tmp_path, english, texts, "--max_unknown=1")
    assert (tmp_path / "cache" / "mine_lm" / "COMPLETED").exists()


def test_both_sides_of_pairs_count(tmp_path, english):
    pairs = [{"q": "the red house", "a": '{"colour": 1}'}] * 9
    with pytest.raises(UserError, match=r"cannot spell '\"', '{', 'c', ':', '}'"):
        run(tmp_path, english, pairs, task="supervised")


def test_runs_of_lost_characters_count_with_their_bytes(tmp_path, english, capsys):
    """One unknown token stands for all of them."""
    texts = [*TEXTS, *(f"the house {'数' * 60}" for _ in range(40))]
    with pytest.raises(UserError, match=r"6\d\.\d% of the text's bytes become unknown .*'数'"):
        run(tmp_path, english, texts)
    lost = run(tmp_path, english, texts, "--max_unknown=1").splits["train"][0].lost
    assert lost == {"bytes": 40 * (60 * 3 - 1)}  # less the space that the vocabulary adds
    assert "text in them" in capsys.readouterr().out


def test_targets_that_are_all_lost_are_refused(tmp_path, english):
    pairs = [{"q": "the red house number stands near the gate " * 9, "a": "да"}] * 9
    with pytest.raises(UserError, match=r"100\.0% of the targets hold unknown tokens alone"):
        run(tmp_path, english, pairs, task="supervised")


def test_a_small_limit_holds(tmp_path, english):
    texts = [*TEXTS * 9, "the red house}"]
    with pytest.raises(UserError, match=r"more than --max_unknown=0\.0:"):
        run(tmp_path, english, texts, "--max_unknown=0")
    run(tmp_path, english, texts)


@pytest.mark.parametrize(("indent", "says"), [("    ", True), ("", False)])
def test_indented_lines_that_become_spaces_are_named(tmp_path, english, capsys, indent, says):
    run(tmp_path, english, [*TEXTS, f"the house\n{indent}number near\nthe gate"])
    assert ("warning: texts have indented lines" in capsys.readouterr().out) == says
