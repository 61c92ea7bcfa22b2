"""Flags of other trainers get the flag that takes their place, or an answer."""

import pytest

from palimpsest.commands import COMMANDS, command
from tasks import annexes
from tasks.terminal import foreign_flags
from tasks.terminal.flags import flags_of, parse


def known(module):
    return [name for flag in flags_of(command(module).flags) for name in flag.names]


@pytest.mark.parametrize(
    ("module", "word", "advice"),
    [
        ("trainer.pretrain", "resume", "the same command resumes"),
        ("trainer.pretrain", "resume-from-checkpoint", "the same command resumes"),
        ("trainer.pretrain", "epochs", "give --train_steps"),
        ("trainer.pretrain", "device", "JAX_PLATFORMS"),
        ("trainer.pretrain", "config", "settings are flags"),
        ("trainer.pretrain", "max_length", "--lengths.inputs or --lengths.targets?"),
        ("trainer.pretrain", "seq_length", "--lengths.inputs or --lengths.targets?"),
        ("trainer.pretrain", "num_layers", "--model.num_encoder_layers or --model.num_decoder"),
        ("trainer.pretrain", "model.num_layers", "--model.num_encoder_layers or --model.num_dec"),
        ("trainer.pretrain", "lr", "--optimizer.learning_rate?"),
        ("trainer.pretrain", "bf16", "--model.dtype?"),
        ("trainer.pretrain", "output_dir", "--model_dir?"),
        ("trainer.pretrain", "wandb", "--metrics.wandb?"),
        ("trainer.pretrain", "optim.base_lr", "--optimizer.learning_rate?"),
        ("trainer.pretrain", "eval.every_steps", "--evaluation.every_steps?"),
        ("trainer.pretrain", "lenghts.inputs", "--lengths.inputs?"),
        ("trainer.pretrain", "rates.inputs", ""),
        ("trainer.pretrain", "model.name", ""),  # nor is model.norm
        ("trainer.pretrain", "trian_steps", "--train_steps?"),
        ("pipeline.build", "seq_length", "--row_tokens?"),
        ("pipeline.build", "num_workers", "--workers?"),
        ("pipeline.build", "column", "?column=NAME"),
        ("pipeline.build", "output", "--cache_dir?"),
        ("vocab.train", "input", "--corpus?"),
        ("vocab.train", "model_prefix", "--output?"),
        ("vocab.train", "max_sentence_length", "whole corpus"),
        ("trainer.generate", "max_length", "--max_new_tokens?"),
        ("trainer.generate", "stop", ""),  # not --step
        ("trainer.export", "output_dir", "--output?"),
        ("pipeline.verify", "cache_dir", "--cache?"),
        ("trainer.pretrain", "lengths", "(it is a group: --lengths.inputs, --lengths.targets)"),
        ("trainer.pretrain", "optimizer", "--optimizer.warmup_steps, …)"),
        ("trainer.pretrain", "averages.ema_decay", "--average=last:K"),
    ],
)
def test_a_foreign_flag_gets_its_answer(module, word, advice):
    found = foreign_flags.hint(f"--{word}", known(module))
    assert advice in found
    assert bool(found) == bool(advice)


def test_every_flag_that_is_named_exists():
    everything = set().union(*map(known, COMMANDS.values()))
    rows = [*foreign_flags.table()["instead"], *annexes.entries("foreign_flags")]
    named = {flag for flags in rows for flag in flags.split() if flag != "|"}
    named |= foreign_flags.table()["answers"].keys() - {"any"}
    assert named <= everything, named - everything


@pytest.mark.parametrize(
    ("module", "name", "step"),
    [
        ("pipeline.verify", "cache", ""),
        ("trainer.evaluate", "model_dir", "steps"),
        ("trainer.export", "model_dir", "step"),
        ("trainer.generate", "", "step"),
    ],
)
def test_a_run_or_cache_needs_no_flag_and_a_step_has_two_names(module, name, step):
    flags = command(module).flags
    others = [f"--{flag.name}=1" for flag in flags_of(flags) if flag.required]
    words = ["folder"] * bool(name) + [each for each in others if not each.startswith(f"--{name}=")]
    for word in ("--step=3", "--steps=3") if step else ():
        assert str(parse(flags, [*words, word]).values[step]) == "3"
    if name:
        assert parse(flags, words).values[name] == "folder"
