"""Rates of mixtures, and their syntax."""

import pytest

from tasks import registry
from tasks.mixture import MixtureSpec, limited_shares, parse, parse_schedule
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


@pytest.mark.tensorflow
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


def test_rates_of_their_own_allow_a_limit_of_epochs_alone():
    tasks = (("a", 1.0), ("b", 2.0))
    assert MixtureSpec("m", tasks, max_epochs=3).max_epochs == 3
    for settings in ({"alpha": 0.3}, {"temperature": 2.0}):
        with pytest.raises(ValueError, match="leave out the rates"):
            MixtureSpec("m", tasks, **settings)


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


def test_alpha_is_the_power_of_sizes():
    sizes = {"ro": 1_000_000, "en": 10_000, "sw": 100}
    tasks = tuple((name, None) for name in sizes)
    spec = MixtureSpec("m", tasks, alpha=0.3)
    assert spec.weights(sizes) == {name: float(size) ** 0.3 for name, size in sizes.items()}
    assert set(MixtureSpec("m", tasks, alpha=0.0).weights(sizes).values()) == {1.0}
    same = MixtureSpec("m", tasks, temperature=1 / 0.3).weights(sizes)
    assert spec.weights(sizes) == pytest.approx(same, rel=1e-12)


def test_no_share_exceeds_its_limit_and_the_others_keep_their_proportions():
    weights = {"large": 4.0, "small": 2.0, "middle": 1.0, "tiny": 1.0}
    limits = {"large": 1000.0, "small": 40.0, "middle": 500.0, "tiny": 10.0}
    shares = limited_shares(weights, limits, 400)
    assert list(shares) == list(weights)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["small"] * 400 == pytest.approx(40)
    assert shares["tiny"] * 400 == pytest.approx(10)
    assert shares["large"] / shares["middle"] == pytest.approx(4)
    # All at their limits.
    full = limited_shares(weights, limits, 1550)
    assert {name: share * 1550 for name, share in full.items()} == pytest.approx(limits)
    with pytest.raises(ValueError, match="allow 1,550 rows, but the run reads 1,551"):
        limited_shares(weights, limits, 1551)


@pytest.mark.parametrize("power", [3, 8, 12, 15])
def test_limits_hold_for_weights_that_differ_by_any_power_of_ten(power):
    weights = {"a": 1.0, "b": 10.0**-power, "c": 3 * 10.0**-power}
    shares = limited_shares(weights, {"a": 5, "b": 3, "c": 2}, 9)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)
    assert shares == pytest.approx({"a": 5 / 9, "b": 2 / 9, "c": 2 / 9})


def test_equal_weights_with_limits_are_unimax():
    sizes, epochs, budget = {"a": 100, "b": 20, "c": 3000, "d": 7}, 4, 2000
    # Source: Chung et al. 2023, algorithm 1, as the paper writes it.
    left, expected = float(budget), {}
    for place, name in enumerate(sorted(sizes, key=sizes.__getitem__)):
        expected[name] = min(left / (len(sizes) - place), epochs * sizes[name])
        left -= expected[name]
    spec = MixtureSpec("m", tuple((name, None) for name in sizes), alpha=0.0, max_epochs=epochs)
    limits = {name: epochs * size for name, size in sizes.items()}
    shares = limited_shares(spec.weights(sizes), limits, budget)
    assert {name: share * budget for name, share in shares.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": 1.5}, "alpha must be from 0 to 1, not 1.5"),
        ({"alpha": -0.1}, "alpha must be from 0 to 1, not -0.1"),
        ({"alpha": 0.3, "temperature": 2.0}, "set only one of them"),
        ({"max_epochs": 0}, "max_epochs must be above 0, not 0"),
        ({"size": "words"}, "size must be one of examples, documents"),
    ],
)
def test_settings_out_of_range_are_rejected(settings, says):
    with pytest.raises(ValueError, match=says):
        MixtureSpec("m", (("a", None), ("b", None)), **settings)
