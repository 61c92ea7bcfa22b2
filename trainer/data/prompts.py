"""How a run reads prompts: like the inputs or the beginnings of its rows."""

from typing import NamedTuple

from trainer.data.run import Run


class PromptForm(NamedTuple):
    """The form of prompts: EOS follows them if `ends`; they attend both ways if `prefix`."""

    ends: bool
    prefix: bool


def prompt_form(run: Run) -> PromptForm:
    """Returns the form of a run's prompts, which are inputs if its tasks have inputs."""
    decoder_only = not run.config.model.has_encoder
    if not decoder_only or run.lengths.inputs:
        return PromptForm(ends=True, prefix=decoder_only)
    prefix = any("prefix" in cached.task.objective.features for cached in run.data.tasks)
    return PromptForm(ends=False, prefix=prefix)
