"""Settings that may change between a checkpoint and the run that resumes it."""

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tasks import mixture
from tasks.terminal.flag_fields import Changes, as_flag
from trainer.config import field_paths
from trainer.config.evaluation import LOWER_IS_BETTER
from trainer.config.run import Config
from trainer.config.unused_fields import unread_fields

# Values of `changes` that a resumed run accepts: parameters of earlier steps are unaffected.
# `on_nan` and `spike_factor` may change so that a stopped run can be resumed; skipped updates stay
# skipped. A different mesh, attention, choice of deterministic kernels or (see `_why_results`)
# number of microbatches changes only the order of summation.
# Which updates and which batches are evaluated.
_EVALUATED = ("evaluation.every_steps", "evaluation.batches")
_HARMLESS = ("later", "later_batches", "rounding", "nothing")


def changes(path: str) -> Changes:
    """Returns what a different value of the field at `path` changes."""
    found: Changes = "results"
    kind: Any = Config
    for name in path.split("."):
        if not dataclasses.is_dataclass(kind):  # an element of a tuple
            break
        each = next(field for field in dataclasses.fields(kind) if field.name == name)
        found = each.metadata["changes"] or found
        kind = typing.get_type_hints(kind)[name]
    return found


def may_change(path: str) -> bool:
    """Returns whether a resumed run usually accepts another value of the field at `path`."""
    return changes(path) in _HARMLESS


def changes_in(path: str, *configs: Config) -> tuple[Changes, str]:
    """Returns what a different value of the field at `path` changes in runs with these settings.

    The text is the reason if that is more than `changes` says, else "".
    """
    for config in configs:
        if why := _why_results(path, config):
            return "results", why
    return changes(path), ""


def _why_results(path: str, config: Config) -> str:
    """Returns why a field that seems harmless changes a run's results; "" if it does not."""
    if path == "microbatches":
        if config.model.dropout_rate > 0:
            return "each part of the batch draws its own dropout"
        if config.loss.normalize_over == "microbatch" and config.loss.normalizer != "sum":
            return "each part of the batch is normalized separately (loss.normalize_over)"
        if couples := config.model.facts("feed_forward").couples:
            return str(couples)
    for watch in ("plateau", "stopping"):
        metric = getattr(config, watch).metric
        if metric is None or not path.startswith("evaluation."):
            continue
        # Otherwise the metric is of generated texts.
        of_tokens = re.split("[:/]", metric)[-1] in LOWER_IS_BETTER
        if path in _EVALUATED or (not of_tokens and path != "evaluation.batch_size"):
            return f"{watch}.metric compares evaluations"
    return ""


def config_changes(before: Config, now: Config, step: int) -> list[str]:
    """Returns one message per field that differs and determines the parameters up to `step`."""
    found = _differences(before, now, _HARMLESS)
    read = before.data.skips.batch(step)
    schedules = [
        [entry for entry in mixture.parse_schedule(config.mixing.schedule) if entry[0] < read]
        for config in (before, now)
    ]
    if schedules[0] != schedules[1]:
        found.append(
            f"mixing.schedule was {before.mixing.schedule!r}, is {now.mixing.schedule!r}, "
            f"different before update {step}"
        )
    phases = [
        [phase for phase in config.phases.phases if 0 < phase.begin < read]
        for config in (before, now)
    ]
    if phases[0] != phases[1]:
        found += [
            f"{name} was {getattr(before, name)!r}, is {getattr(now, name)!r}, different before "
            f"update {step}"
            for name in ("batch_schedule", "length_schedule")
            if getattr(before, name) != getattr(now, name)
        ]
    if step and before.phases.nest != now.phases.nest:
        found.append(
            f"the longest rows of length_schedule were {before.phases.nest or 'unset'}, are "
            f"{now.phases.nest or 'unset'}; they decide the order of all batches"
        )
    return found + skip_changes(before, now, step)


def skip_changes(before: Config, now: Config, step: int) -> list[str]:
    """Returns a message if other batches were read up to `step` than the new skips leave."""
    read = before.data.skips.batch(step)
    if before.data.skips.up_to(read) == now.data.skips.up_to(read):
        return []
    was, now_is = (as_flag(config.data.skip) or "unset" for config in (before, now))
    return [
        f"data.skip was {was}, is {now_is}, but update {step} is made, which read batch {read}: "
        "only --rewind_to an earlier checkpoint changes what it read"
    ]


def resumed(
    history: Sequence[Mapping[str, Any]], step: int, before: Config, now: Config
) -> list[Mapping[str, Any]]:
    """Returns a run's history with an entry about a start from the checkpoint of `step`, if due.

    An entry has "after_update", the flag of a rewind or a branch as "by", and "changes" of settings
    that affect results from then on.
    """
    by = ""
    if now.rewind_to == step:
        by = rewind_entry(step)
    elif now.branch and now.branch_from != before.branch_from:
        by = f"--branch_from={now.branch_from}"
    found = _differences(before, now, ("rounding", "nothing"))
    changes = [text for text in found if not text.startswith(_BEGINNING)]
    if now.branch and before.train_steps != now.train_steps:
        changes.append(f"train_steps was {before.train_steps}, is {now.train_steps}")
    entry = {"after_update": step, "by": by, "changes": changes}
    return [*history, entry] if by or changes else [*history]


def rewind_entry(step: int) -> str:
    """Returns "by" of the entry about a rewind."""
    return f"--rewind_to={step}"


# They say how a run begins, not what its later updates compute.
_BEGINNING = ("init_from", "branch_from")


def _differences(before: Config, now: Config, harmless: Collection[str]) -> list[str]:
    old = dict(field_paths.leaves(before))
    unread = unread_fields(before).keys() & unread_fields(now).keys()
    found = []
    for path, value in field_paths.leaves(now):
        kind, why = changes_in(path, before, now)
        if old.get(path) != value and path not in unread and kind not in harmless:
            reason = f", and {why}" if why else ""
            found.append(f"{path} was {old.get(path)}, is {value}{reason}")
    return found
