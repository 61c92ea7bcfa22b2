"""JSON objects that hold the SHA-256 of their other entries, so that damage is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "sha256"


def sealed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with their SHA-256."""
    return {**entries, _SEAL: _sha256(entries)}


def opened(value: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Returns (the entries without their SHA-256, whether it is theirs); None if there is none."""
    entries = {name: entry for name, entry in value.items() if name != _SEAL}
    return entries, value[_SEAL] == _sha256(entries) if _SEAL in value else None


def _sha256(entries: Mapping[str, Any]) -> str:
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
