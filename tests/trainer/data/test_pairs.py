"""Runs on pairs: alone and mixed with denoising, for both architectures, on any number of hosts."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.cache.cache import Cache
from tasks.cache.pair_windows import row_windows
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAIR_BORDER
from tests.support import runs
from tests.support.runs import assert_shared
from trainer.exporting import card
from trainer.huggingface.parity import Parity
from trainer.huggingface.tokenizer import Match

SPANS, PAIRS = "python_docs_span_corruption", "qa_supervised"


def run_of(folder, task, *flags, **more):
    cut = ["--objective=too_long=cut"] * (task == PAIRS)
    return runs.run_of(folder, "--batch_size=8", *cut, *flags, task=task, lengths=(64, 24), **more)


def pairs_of(folder, split="train", most=(63, 23)):
    cache = Cache.open(str(folder / PAIRS))
    windows = row_windows(cache.folder, cache.manifest, split)
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    found = []
    for tokens_N, length in zip(tokens_WN, lengths_W, strict=True):
        tokens = tokens_N[:length].tolist()
        border = tokens.index(PAIR_BORDER)
        sides = (tokens[:border], tokens[border + 1 :])
        found.append(tuple(tuple(side[:limit]) for side, limit in zip(sides, most, strict=True)))
    return found


def sides_of(batch):
    """Returns the (inputs, targets) of the rows of an encoder-decoder's batch, without padding."""
    return [
        tuple(tuple(row[row > 0].tolist()) for row in rows)
        for rows in zip(batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True)
    ]


def test_an_epoch_reads_every_pair_once_as_it_is(pairs_and_text):
    run = run_of(pairs_and_text, PAIRS)
    wanted = sorted(((*i, EOS_ID), (*t, EOS_ID)) for i, t in pairs_of(pairs_and_text))
    steps = -(-len(wanted) // 8)
    batches = run.data.batches()
    found = [row for step in range(steps) for row in sides_of(batches[step])]
    assert sorted(found[: len(wanted)]) == wanted
    assert found[: len(wanted)] != wanted
    assert (batches[0]["decoder_loss_weights"] == (batches[0]["decoder_target_tokens"] > 0)).all()


def test_a_decoder_has_the_inputs_without_weight(pairs_and_text):
    both, alone = run_of(pairs_and_text, PAIRS), run_of(pairs_and_text, PAIRS, preset="lm_tiny")
    pairs = sides_of(both.data.batches()[3])
    batch = alone.data.batches()[3]
    for row, (inputs, targets) in enumerate(pairs):
        tokens = batch["decoder_target_tokens"][row]
        assert tuple(tokens[tokens > 0].tolist()) == inputs + targets
        weights = batch["decoder_loss_weights"][row].tolist()
        rest = [0] * (len(weights) - len(inputs) - len(targets))
        assert weights == [0] * len(inputs) + [1] * len(targets) + rest
        # Position 0 has no token, so the last token of the inputs is read one position later.
        assert batch["decoder_causal_attention"][row].sum() == len(inputs) + 1


def test_inputs_may_end_without_eos(pairs_and_text):
    with_end = run_of(pairs_and_text, PAIRS).data.batches()[0]
    without = run_of(
        pairs_and_text, PAIRS, "--objective=too_long=cut,inputs_eos=false"
    ).data.batches()[0]
    for (inputs, targets), (others, same) in zip(
        sides_of(with_end), sides_of(without), strict=True
    ):
        assert targets == same
        assert others[: len(inputs) - 1] == inputs[:-1]
        assert EOS_ID not in others


def test_a_mixture_with_denoising_keeps_its_rates_and_hosts_share_it(pairs_and_text):
    longer = "--lengths.inputs=256", "--lengths.targets=80"
    data = run_of(pairs_and_text, f"{SPANS}=0.75,{PAIRS}=0.25", *longer).data
    whole = data.batches()
    shares = np.bincount(np.concatenate([whole.places(step).sources for step in range(50)]))
    assert shares.tolist() == [300, 100]
    assert_shared(data.batches, (0, 7, 10**6))


def test_evaluation_reads_every_pair_once(pairs_and_text):
    run = run_of(pairs_and_text, PAIRS)
    (found,) = run.data.evaluation("validation", 8)
    rows = [row for batch in found.iterate() for row in sides_of(batch) if row != ((), ())]
    wanted = [((*i, EOS_ID), (*t, EOS_ID)) for i, t in pairs_of(pairs_and_text, "validation")]
    assert rows == wanted


def test_start_up_counts_pairs_that_are_cut(pairs_and_text):
    lines = dict(run_of(pairs_and_text, PAIRS, "--lengths.inputs=16").data.consequences())
    whole = pairs_of(pairs_and_text, most=(None, None))
    cut = sum(len(i) > 15 or len(t) > 23 for i, t in whole)
    assert lines["task"] == f"{PAIRS}: a pair -> inputs 16, targets 24"
    assert lines["warning"].startswith(f"{cut:,} of {len(whole)} pairs cut")


def test_mistakes(pairs_and_text):
    with pytest.raises(UserError, match=r"set it to .*, or cut longer ones"):
        run_of(pairs_and_text, f"{PAIRS},{SPANS}", "--lengths.inputs=16").data.batches()
    with pytest.raises(UserError, match="holds texts, but this objective"):
        run_of(pairs_and_text / SPANS, "supervised").data.batches()
    with pytest.raises(UserError, match="holds pairs of inputs and targets"):
        run_of(pairs_and_text / PAIRS, "ul2").data.batches()


def test_a_model_card_says_what_the_run_started_from(pairs_and_text):
    def card_of(task, source):
        run = run_of(pairs_and_text, task)
        run = replace(run, config=replace(run.config, init_from=source))
        parity, match = Parity(8, 100, 0.0, 1.0), Match(100, [])
        return card.model_card(run, 3, "mine", parity, match, False, {})

    plain = card_of(SPANS, None)
    assert "pretrained with Palimpsest and not fine-tuned." in plain
    assert "<extra_id_0>" in plain
    assert 'tags: ["pretraining", "palimpsest"]' in plain
    source = "starting from the parameters of runs/first."
    assert f"Trained with Palimpsest, {source}" in card_of(SPANS, "runs/first")
    tuned = card_of(PAIRS, "runs/first")
    assert f"Trained with Palimpsest on pairs of inputs and targets, {source}" in tuned
    assert 'tags: ["fine-tuning", "palimpsest"]' in tuned
    assert "not fine-tuned" not in tuned
    assert "<extra_id_0>" not in tuned
