"""Encoder-decoders made of decoders: the parameters, the function, training and the export."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from tasks.vocabulary import T5_IDS
from tests.support import decoder_folders, runs
from tests.support.decoder_folders import SIZES, written
from tests.support.runs import stub
from trainer.annexes.adapting import adapting
from trainer.config.from_flags import RunFlags, configured
from trainer.huggingface import configs, model_config
from trainer.initialization import init_from
from trainer.model.config import ModelConfig
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params

DECODERS = {
    "gemma2": ModelConfig(
        family="gemma",
        num_kv_heads=2,
        norm_placement="sandwich",
        attention_softcap=2.0,
        logits_softcap=3.0,
        attention_window="sliding:window=5,layers=lg",
        **SIZES,
    ),
    **decoder_folders.DECODERS,
}


@pytest.fixture(params=DECODERS)
def folder(request, tmp_path):
    """Returns (a decoder's configuration, its parameters, a folder of transformers with them)."""
    config = DECODERS[request.param]
    params = written(tmp_path, config)
    assert model_config(str(tmp_path)).family == config.family
    return config, params, tmp_path


def run_of(folder, *flags):
    words = [f"--init_from=hf:{folder}", "--adapt=encoder_decoder", *flags]
    config, _ = configured(made(RunFlags, parse(RunFlags, words)))
    run = stub(config, vocab_size=704)
    run.converter = SimpleNamespace(special=T5_IDS)
    return run


@pytest.mark.parametrize("shared", [False, True])
def test_both_stacks_start_as_the_decoder(folder, shared):
    _, params, path = folder
    run = run_of(path, f"--model.shared_embedding={str(shared).lower()}")
    model = run.config.model
    assert (model.architecture, model.num_encoder_layers) == ("encoder_decoder", 2)
    start = init_from.start(run)
    found = {name: np.asarray(leaf.whole()) for name, leaf in start.parameters.items()}
    theirs = named(params)
    for name, leaf in theirs.items():
        if "token_embedder" in name and shared:
            np.testing.assert_array_equal(found["token_embedder/embedding"], leaf)
            continue
        np.testing.assert_array_equal(found[name], leaf)
        twins = [name.replace("decoder", "encoder").replace("self_attention", "attention")]
        if "/self_attention/" in name:
            twins.append(name.replace("self_attention", "encoder_decoder_attention"))
        for twin in twins:
            if "logits_dense" not in twin:
                np.testing.assert_array_equal(found[twin], leaf)


def test_merged_attention_needs_no_new_kernels(folder):
    _, params, path = folder
    flags = ["--model.shared_embedding=true", "--model.cross_attention=merged"]
    start = init_from.start(run_of(path, *flags))
    found = {name: np.asarray(leaf.whole()) for name, leaf in start.parameters.items()}
    of_decoder = [name for name in found if name.startswith("decoder/")]
    theirs = named(params)
    assert {*of_decoder} == {name for name in theirs if "token_embedder" not in name}
    for name in of_decoder:
        np.testing.assert_array_equal(found[name], theirs[name])
    with pytest.raises(UserError, match="--adapt_cross=new has no effect with"):
        init_from.start(run_of(path, *flags, "--adapt_cross=new"))


def test_an_adapted_gemma_2_is_a_t5gemma(folder):
    decoder, _, path = folder
    model = adapting.adapted("encoder_decoder", model_config(str(path)), "x")
    kind = configs.model_type(model)
    assert (kind == "t5gemma") == (decoder.norm_placement == "sandwich")
    if decoder.norm_placement == "sandwich":
        assert model.attention_window == "sliding:window=5,layers=lg,reach=5"


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
def test_an_adapted_model_trains_and_resumes(folder, text_cache, tmp_path):
    _, _, path = folder
    # A folder without a tokenizer has the ids of the cache.
    flags = [f"--init_from=hf:{path}", "--adapt=encoder_decoder", "--checkpoint.every_steps=2"]
    flags += ["--metrics.every_steps=1", "--evaluation.every_steps=0"]

    def train(model_dir, steps):
        words = runs.flags_of(text_cache, model_dir, *flags, f"--train_steps={steps}")
        return runs.done(runs.command("trainer.pretrain", *words))

    train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    train(tmp_path / "parts", 4)
    whole, parts = (runs.metadata(tmp_path / name, 4)["checksums"] for name in ("whole", "parts"))
    assert whole == parts


def test_what_cannot_be_adapted_is_refused(folder):
    _, _, path = folder
    model = adapting.adapted("encoder_decoder", model_config(str(path)), "x")
    with pytest.raises(UserError, match="--adapt: x is a t5gemma model, not a decoder-only one"):
        adapting.adapted("encoder_decoder", model, "x")
    words = ["--preset=t5_1_1_tiny", "--adapt=encoder_decoder"]
    with pytest.raises(UserError, match=r"--adapt.*without --init_from=hf:DIR"):
        configured(made(RunFlags, parse(RunFlags, words)))


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
@pytest.mark.parametrize("wider", [False, True])
def test_the_encoder_may_start_as_another_decoder(folder, wider, tmp_path):
    config, params, path = folder
    sizes = {"emb_dim": 48, "num_heads": 6, "num_kv_heads": 3, "mlp_dim": 40} if wider else {}
    other = tmp_path / "other"
    other.mkdir()
    theirs = written(other, replace(config, num_decoder_layers=3, **sizes), seed=2)
    flags = [f"--adapt_encoder=hf:{other}", *([] if wider else ["--adapt_cross=new"])]
    run = run_of(path, *flags)
    assert run.config.model.num_encoder_layers == 3
    assert bool(run.config.model.encoder_sizes) == wider
    start = init_from.start(run)
    found = {name: np.asarray(leaf.whole()) for name, leaf in start.parameters.items()}
    for name, leaf in named(params).items():
        np.testing.assert_array_equal(found[name], leaf)
    for name, leaf in named(theirs).items():
        name = name.replace("decoder", "encoder").replace("self_attention", "attention")
        np.testing.assert_array_equal(found[name], leaf)
    key = "decoder/layers_1/encoder_decoder_attention/key/kernel"
    assert found[key].shape == ((48 if wider else 32), 16)
    begun = named(init_params(model_spec(run.config.model), jax.random.key(run.config.seed)))
    new = [name for name in found if "encoder_decoder_att" in name or "cross_att" in name]
    assert len(new) == 2 * (4 + 2)
    for name in new:
        np.testing.assert_array_equal(found[name], begun[name])
    if wider:
        with pytest.raises(UserError, match="the encoder has width 48, the decoder 32"):
            init_from.start(run_of(path, *flags, "--adapt_cross=self_attention"))


def test_an_encoder_starts_as_the_decoder(folder):
    _, params, path = folder
    words = [f"--init_from=hf:{path}", "--adapt=encoder"]
    config, _ = configured(made(RunFlags, parse(RunFlags, words)))
    run = stub(config, vocab_size=704)
    run.converter = SimpleNamespace(special=T5_IDS)
    assert not config.model.has_decoder
    start = init_from.start(run)
    found = {name: np.asarray(leaf.whole()) for name, leaf in start.parameters.items()}
    for name, leaf in named(params).items():
        for ours, theirs in (
            *(("decoder/token_embedder", "token_embedder"), ("decoder/logits", "mlm_head/logits")),
            *(("decoder", "encoder"), ("self_attention", "attention")),
        ):
            name = name.replace(ours, theirs)
        np.testing.assert_array_equal(found.pop(name), leaf)
    assert all(name.startswith(("mlm_head/", "order_head/")) for name in found)


@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
def test_decoders_that_do_not_fit_are_refused(folder, tmp_path):
    config, _, path = folder
    other = tmp_path / "other"
    other.mkdir()
    written(other, replace(config, attention_softcap=None))
    with pytest.raises(UserError, match=r"other differs from .* in attention_softcap: stacks may"):
        run_of(path, f"--adapt_encoder=hf:{other}")
    written(other, config)
    with pytest.raises(UserError, match="two embeddings need"):
        init_from.start(
            run_of(path, f"--adapt_encoder=hf:{other}", "--model.shared_embedding=true")
        )
    with pytest.raises(UserError, match=r"--adapt_encoder.*hf:DIR"):
        run_of(path, f"--adapt_encoder={other}")
