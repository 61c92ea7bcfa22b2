"""Rates of mixtures, and their syntax."""

import pytest

from tasks import registry
from tasks.mixture import MixtureSpec, parse, parse_schedule
from tasks.terminal.command_line import UserError


def test_rates_are_weights_or_numbers_of_examples():
    examples = {"a": 1_000_000, "b": 10_000, "c": 100}
    proportional = MixtureSpec("m", (("a", None), ("b", None), ("c", None)))
    assert proportional.weights(examples) == examples
    # Source: seqio's mixing_rate_num_examples, min(examples, maximum) ** (1 / temperature).
    limited = MixtureSpec("m", proportional.tasks, maximum=65_536)
    assert limited.weights(examples) == {"a": 65_536, "b": 10_000, "c": 100}
    warm = MixtureSpec("m", proportional.tasks, maximum=40_000, temperature=2.0)
    assert warm.weights(examples) == pytest.approx({"a": 200, "b": 100, "c": 10})
    mixed = MixtureSpec("m", (("a", 7.0), ("c", None)), temperature=2.0)
    assert mixed.weights(examples) == pytest.approx({"a": 7, "c": 10})


def test_seqio_has_the_same_rates():
    from seqio import utils

    class Task:
        name, cache_dir = "a", None

        def num_input_examples(self, split):
            return 123_456

    for maximum, temperature in ((None, 1.0), (1000, 1.0), (200_000, 4.0), (5000, 0.5)):
        theirs = utils.mixing_rate_num_examples(Task(), maximum=maximum, temperature=temperature)
        ours = MixtureSpec("m", (("a", None),), maximum, temperature).weights({"a": 123_456})
        assert ours["a"] == pytest.approx(theirs, rel=1e-12)


def test_mixtures_are_written_as_lists():
    assert parse("a=0.7, b=3").tasks == (("a", 0.7), ("b", 3.0))
    assert parse("a").tasks == (("a", None),)
    assert parse_schedule("20: a=1,b=2; 40:b") == (
        (20, MixtureSpec("a=1,b=2", (("a", 1.0), ("b", 2.0)))),
        (40, MixtureSpec("b", (("b", None),))),
    )
    assert parse_schedule("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a=often", "rate of a is often"),
        ("a=1,", "name is missing"),
        ("a=1,b=0", "rate of b is 0.0"),
        ("a=inf", "rate of a is inf"),
        ("a,b,a", "names task a twice"),
    ],
)
def test_invalid_mixtures_are_rejected(text, says):
    with pytest.raises((UserError, ValueError), match=says):
        parse(text)


def test_a_limit_without_effect_is_rejected():
    with pytest.raises(ValueError, match="leave the rates out"):
        MixtureSpec("m", (("a", 1.0),), temperature=2.0)


@pytest.mark.parametrize("text", ["a=1", "0:a", "x:a", "40:a;20:b"])
def test_invalid_schedules_are_rejected(text):
    with pytest.raises(UserError):
        parse_schedule(text)


def test_a_users_file_may_have_mixtures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "our_mixtures.py").write_text(
        "from tasks.mixture import MixtureSpec\n"
        "MIXTURES = (MixtureSpec('both', (('rlm_ul2', 1.0), ('c4_ul2', 2.0))),)\n"
    )
    assert registry.mixtures("our_mixtures")["both"].names == ("rlm_ul2", "c4_ul2")
    assert registry.mixtures() == {}
    # A module need not have tasks of its own.
    assert registry.tasks("our_mixtures") == registry.tasks()
