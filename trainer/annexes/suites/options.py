"""Settings of the suite that a run answers. No JAX."""

from dataclasses import dataclass

from tasks.terminal.flag_fields import Checked, field


@dataclass(frozen=True)
class SuiteConfig(Checked):
    """Questions that a run answers at each evaluation."""

    sets: str | None = field(
        None,
        "questions to answer at each evaluation, such as english,FILE.jsonl, evaluation.examples "
        "of each set (docs/evaluating.md)",
        joined=",",
        aliases=("--evaluation.suite", "--evaluation.probes"),
        changes="nothing",
    )

    @property
    def on(self) -> bool:
        return bool(self.sets)


@dataclass(frozen=True)
class SuiteFlags:
    """A suite instead of a split."""

    suite: tuple[str, ...] = field(
        (),
        "questions to answer, such as english,FILE.jsonl, instead of a split (docs/evaluating.md)",
        repeated=True,
    )
