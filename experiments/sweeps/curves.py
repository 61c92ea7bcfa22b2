"""Learning curves, and comparisons of how many updates they need."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric over the evaluations of a run; `steps` are in updates."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def final(self) -> float:
        """The value at the last evaluation."""
        return self.values[-1]

    @property
    def by_step(self) -> dict[int, float]:
        """The values by update."""
        return dict(zip(self.steps, self.values, strict=True))

    def steps_to(self, value: float) -> float:
        """Returns interpolated updates until the metric first falls to `value`; inf if never."""
        if self.values[0] <= value:
            return float(self.steps[0])
        for (before, high), (after, low) in itertools.pairwise(self.by_step.items()):
            if low <= value:
                return before + (after - before) * (high - value) / (high - low)
        return math.inf


def steps_ratio(baseline: Curve, variant: Curve) -> float:
    """Returns how many times fewer updates the variant needs to reach the baseline's final value.

    If the variant never reaches it, the ratio is below 1: the updates in which the baseline reaches
    the variant's final value, divided by all baseline updates. Multiplied by the ratio of seconds
    per update, it is Primer's speed-up. NaN if a final value is not finite, inf for no updates.
    Source: So et al. 2021 (arXiv:2109.08668), section 4: the baseline's compute divided by the
    variant's at equal quality.
    """
    if not (math.isfinite(variant.final) and math.isfinite(baseline.final)):
        return math.nan
    if variant.final <= baseline.final:
        needed = variant.steps_to(baseline.final)
        return baseline.steps[-1] / needed if needed else math.inf
    return baseline.steps_to(variant.final) / baseline.steps[-1]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds, and Student's 95% interval for the mean.

    A single value has deviation 0 and no interval. All are NaN or None if a value is not finite.
    """

    mean: float
    deviation: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Returns the spread of values, by Student's t with len(values) - 1 degrees of freedom."""
        mean, count = statistics.fmean(values), len(values)
        if not math.isfinite(mean):
            return cls(math.nan, math.nan, None)
        if count < 2:
            return cls(mean, 0.0, None)
        from scipy import stats

        deviation = statistics.stdev(values)
        half = float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
        return cls(mean, deviation, (mean - half, mean + half))

    def shown(self, digits: int = 4, sign: bool = False) -> str:
        """Returns the mean and deviation as text, or "-"; `sign` adds a plus sign."""
        if not math.isfinite(self.mean):
            return "-"
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return f"{mean} ± {self.deviation:.{digits}f}"

    def shown_interval(self, digits: int = 4, sign: bool = False) -> str:
        """Returns the interval as text; "-" if there is none."""
        if self.interval is None:
            return "-"
        plus = "+" if sign else ""
        return " to ".join(f"{end:{plus}.{digits}f}" for end in self.interval)
