"""The examples of a batch as rows of values, for `palimpsest.Model.examples`."""

from collections.abc import Mapping
from typing import Any

from tasks.annexes.inspecting import show
from trainer.annexes.comparing import explain
from trainer.annexes.comparing.explanation import Explanation


def examples(flags: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the examples; `flags` are flags of `palimpsest explain`."""

    def explained(typed: Any) -> list[dict[str, str]]:
        found = Explanation(typed.model_dir, typed.step, typed.cache_dir)
        return [show.row(found.sample(*place), found.ids) for place in found.examples_of(typed.row)]

    return explain.main.call(explain.main.typed(flags), explained)
