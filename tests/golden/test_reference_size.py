"""A folder of references of any size is compared, however small."""

import json

import numpy as np
import pytest

from tests.support.processes import started

pytestmark = pytest.mark.processes


def test_a_smaller_folder_is_compared(reference, tmp_path):
    arrays = reference.arrays("data")
    kept = {
        name: array
        for name, array in arrays.items()
        if name.startswith(("docs/", "pipeline/reduce_concat_tokens_16/"))
    }
    # The first 200 tokens of the joined documents.
    stem = "pipeline/reduce_concat_tokens_16/targets"
    kept[f"{stem}/values"] = kept[f"{stem}/values"][:200]
    kept[f"{stem}/lengths"] = np.array([200])
    np.savez(tmp_path / "data.npz", **kept)
    settings = json.loads((reference.folder / "data.json").read_text())
    settings["random_spans_helper"] = settings["random_spans_helper"][:3]
    (tmp_path / "data.json").write_text(json.dumps(settings))
    flags = ["-p", "no:cacheprovider", f"--reference={tmp_path}"]
    flags += ["-k", "joined_documents or random_spans_helper"]
    made = started("-m", "pytest", "tests/golden/test_t5_data.py", *flags)
    assert made.returncode == 0, made.stdout[-2000:]
    assert "\n.." in f"\n{made.stdout}"
