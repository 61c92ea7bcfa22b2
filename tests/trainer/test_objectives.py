"""Every objective trains: two steps of a tiny model on real text, and what no model can take."""

import re

import numpy as np
import pytest

from tasks import registry
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.support.parameters import slow_unless
from tests.trainer.conftest import built
from trainer.data.features import target_side
from trainer.engine.metrics import means
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch

pytestmark = pytest.mark.processes  # whole runs

TASKS = [name for name in registry.tasks() if name.startswith("python_docs_")]
# Other rates and lengths of spans are the same code.
REPEATED = re.compile(r"_iid_(10|25|50)_|_span_(2|5|10)_|_regular_1_5_|_r10s90_")
FIRST = [name for name in TASKS if not REPEATED.search(name)]
LENGTHS = {True: (64, 96), False: (0, 64)}


@pytest.fixture(scope="module")
def separated_cache(text_cache, tmp_path_factory):
    """A cache of a task that needs EOS after documents, built without saying so."""
    folder, caches = text_cache.parents[1], tmp_path_factory.mktemp("separated")
    built(
        "--task=python_docs_full_lm",
        f"--corpus=text:{folder}/*.txt?split=train",
        f"--vocabulary={folder}/vocabulary",
        f"--cache_dir={caches}",
    )
    return caches / "python_docs_full_lm"


def run_of(name, cache, preset=None):
    inputs, targets = LENGTHS[bool(registry.get(name).lengths.inputs)]
    masked = name.endswith(("masked_lm", "sentence_order", "next_sentence"))
    if masked:
        preset = preset or "bert_tiny"
    preset = preset or ("t5_1_1_tiny" if inputs else "lm_tiny")
    lengths, flags = (inputs, inputs if masked else targets), ("--batch_size=8",)
    return runs.run_of(cache, *flags, task=name, preset=preset, lengths=lengths)


PROGRAMS: dict[str, Program] = {}


def program_of(run):
    """One program a preset: tasks of one kind have features of one shape."""
    if run.config.preset not in PROGRAMS:
        PROGRAMS[run.config.preset] = Program(run)
    return PROGRAMS[run.config.preset]


@pytest.mark.parametrize("name", slow_unless(FIRST, TASKS))
def test_two_steps(name, text_cache, separated_cache):
    cache = separated_cache if name.endswith("full_lm") else text_cache
    run = run_of(name, cache)
    program = program_of(run)
    batches = run.data.batches()
    state = program.initial_state()
    for step in range(2):
        batch = batches[step]
        side = target_side(batch)
        weights = batch[f"{side}_loss_weights"]
        assert weights.sum() > 8
        assert not (weights.astype(bool) & (batch[f"{side}_target_tokens"] == 0)).any()
        state = program.train_step(state, put_batch(batch, program.mesh))
    values = means(state.metrics)
    assert int(state.step) == 2
    assert np.isfinite(list(values.values())).all()
    # An untrained model is as good as none: near the logarithm of the vocabulary.
    assert 5 < values["loss"] < 9


def test_a_document_s_eos_comes_from_the_cache(text_cache, separated_cache):
    assert CacheManifest.load(str(separated_cache)).plan.separator == "eos"
    with pytest.raises(UserError, match="--separator=eos"):
        run_of("python_docs_full_lm", text_cache)
    run = run_of("python_docs_full_lm", separated_cache)
    batch = run.data.batches()[0]
    ends = batch["decoder_target_tokens"] == 1
    assert ends.any()
    assert not ends[:, -1].all()


def test_pairs_of_sentences_come_from_any_cache(text_cache, separated_cache):
    """The same windows as masked LM, or twice as long; batches are a function of the step."""
    for name, cache in (("sentence_order", text_cache), ("next_sentence", separated_cache)):
        run = run_of(f"python_docs_{name}", cache)
        batch, again = run.data.batches()[3], run.data.batches()[3]
        assert set(batch["sentence_order"]) <= {0, 1}
        assert {*batch["encoder_token_types"].ravel()} == {0, 1}
        for feature in batch:
            np.testing.assert_array_equal(batch[feature], again[feature])
    with pytest.raises(UserError, match="needs a cache with separator eos"):
        run_of("python_docs_next_sentence", text_cache)


def test_a_model_refuses_objectives_that_it_cannot_take(text_cache, monkeypatch):
    with pytest.raises(UserError, match="encoder-only preset"):
        run_of("python_docs_masked_lm", text_cache, "t5_1_1_tiny")
    fitting = r"choose an encoder-decoder preset .* or a decoder-only preset"
    with pytest.raises(UserError, match=fitting):
        run_of("python_docs_span_corruption", text_cache, "bert_tiny")
    monkeypatch.setitem(LENGTHS, True, (513, 513))
    with pytest.raises(UserError, match=r"--model\.max_positions=513"):
        run_of("python_docs_masked_lm", text_cache)


def test_a_mode_that_the_vocabulary_lacks_is_refused(text_cache, monkeypatch):
    from tasks.objectives.ul2 import MixtureOfDenoisers, ul2_denoisers

    monkeypatch.setattr(
        MixtureOfDenoisers, "pieces", tuple({each.mode for each in ul2_denoisers("[R]")})
    )
    with pytest.raises(UserError, match=r"no piece \[R\]"):
        run_of("python_docs_ul2", text_cache)


def test_tasks_with_and_without_inputs_do_not_mix_in_a_decoder(text_cache):
    names = "python_docs_span_corruption=1,python_docs_decoder_prefix_lm=1"

    def prepared(task):
        return runs.run_of(text_cache.parent, task=task, lengths=(64, 64), preset="lm_tiny")

    says = "python_docs_decoder_prefix_lm has no inputs, but python_docs_span_corruption has"
    with pytest.raises(UserError, match=says):
        prepared(names)
    with pytest.raises(UserError, match=r"--lengths.inputs=64 has no effect"):
        prepared("python_docs_decoder_prefix_lm")
