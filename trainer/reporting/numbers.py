"""Numbers in tables and lines."""

import re

# Larger values, such as losses of runs that diverge, are written with an exponent.
_LARGEST = 1e9


def shown(value: float, form: str) -> str:
    """Returns a value in a form such as "{:.3f} nats", in a shorter one if it is very large."""
    if abs(value) >= _LARGEST:
        form = re.sub(r"\{:.*?\}", "{:.3g}", form)
    return form.format(value)
