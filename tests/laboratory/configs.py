"""Random config.json files of every family, whose logits must be transformers' or that are refused.

A small model of transformers is written with drawn sizes. Its config.json then loses fields, or
gets null, values of other types, other values, and the fields of older and newer releases.
"""

import argparse
import contextlib
import io
import json
import pathlib
import random
import shutil
from typing import Any

import numpy as np

from tasks.terminal.command_line import UserError
from tests.laboratory.commands import Difference
from tests.trainer.huggingface import random_shapes
from tests.trainer.huggingface.sizes import SCALED, THEIR_DECODER, THEIR_ENCODER, YARN
from trainer.huggingface import folder_parity, load, model_config, parity
from trainer.model.paths import named

# Name -> (transformers' class without its ending, fields).
FAMILIES = random_shapes.SHAPES | {
    "llama": ("Llama", THEIR_DECODER),
    "bert": ("Bert", THEIR_ENCODER),
}
# Sizes that are drawn once for all stacks, where the family has them.
_SIZES = {
    "num_key_value_heads": (1, 2),
    "intermediate_size": (40, 48),
    "d_ff": (40, 48),
    "rms_norm_eps": (1e-5, 1e-6),
}
_LINEAR, _DEFAULT = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
_ROPES = (
    *(_LINEAR, _LLAMA3, YARN, _DEFAULT, {"type": "linear", "factor": 2.0}, {}, SCALED),
    {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}},
    {**_LINEAR, "type": "yarn"},
    {**_DEFAULT, "factor": 4.0, "rope_theta": 500.0},
    {**_LINEAR, "rope_theta": 1e6, "beta_fast": 8.0},
    {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"full_attention": _LINEAR, "sliding_attention": _DEFAULT},
    {"full_attention": {**_DEFAULT, "rope_theta": 500.0}, "factor": 2.0},
)
# Fields of any release and family; many are another spelling of one that the file has.
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "rope_theta": (100.0, 1e4, 1_000_000),
    "rope_local_base_freq": (100.0, 1e4),
    "global_rope_theta": (100.0, 160_000.0),
    "local_rope_theta": (100.0, None),
    "partial_rotary_factor": (1.0, 0.5),
    "original_max_position_embeddings": (8, 64),
    "max_position_embeddings": (64, 128),
    "sliding_window": (5, 4096, None),
    "sliding_window_pattern": (1, 2, 6),
    "_sliding_window_pattern": (2, 6),
    "global_attn_every_n_layers": (1, 2),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 28),
    "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 2, ["full_attention", "x"]),
    "hidden_act": ("gelu", "silu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("gelu", "silu", "gelu_pytorch_tanh"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "use_bidirectional_attention": (True, False),
    "attn_logit_softcapping": (2.0, None),
    "final_logit_softcapping": (2.0, None),
    "query_pre_attn_scalar": (8, 20.0),
    "head_dim": (8, 12),
    "num_key_value_heads": (4, 2),
    "tie_word_embeddings": (True, False),
    "scale_decoder_outputs": (True, False),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
    "dense_act_fn": ("relu", "gelu_new"),
    "is_gated_act": (True, False),
    "rms_norm_eps": (1e-5, 1e-3),
    "layer_norm_eps": (1e-3,),
    "layer_norm_epsilon": (1e-3,),
    "position_embedding_type": ("absolute", "relative_key"),
    "scale_attn_weights": (True, False),
    "is_decoder": (True, False),
    "type_vocab_size": (1, 2),
    "local_radius": (3, 6),
    "expert_capacity": (3, 64),
    "encoder_sparse_step": (1, 2),
}
# What a field may hold instead, which is small if it is a size.
_WRONG = ("seven", "7", 7, 0, -1, 0.5, True, [], ["x"], [1], {}, {"x": 1}, None)
_FIXED = ("model_type", "architectures")


class Trial:
    """One folder, and its config.json with drawn changes."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.random = random.Random(f"{flags.seed} configs {number}")
        self.name, self.folder = [*FAMILIES][number % len(FAMILIES)], folder / str(number)
        self.changes: list[str] = []

    def run(self) -> str:
        """Returns the outcome; raises Difference if it is none of those that are allowed."""
        kind, fields = FAMILIES[self.name]
        drawn = {name: self.random.choice(values) for name, values in _SIZES.items()}
        random_shapes.write(kind, _with(fields, drawn), self.folder, self.random.randrange(99))
        path = self.folder / "config.json"
        written = json.loads(path.read_text())
        for _ in range(self.random.choice((1, 1, 2, 3))):
            self.change(written)
        path.write_text(json.dumps(written))
        return f"{self.name}: {self.outcome(written)}; {', '.join(self.changes)}"

    def change(self, written: dict[str, Any]) -> None:
        """Changes a field at the top or of a part."""
        places = [("", written), *_parts(written)]
        where, fields = self.random.choice([places[0], self.random.choice(places)])
        present = [name for name in fields if name not in _FIXED]
        how = self.random.choice(("remove", "null", "wrong", "other", "spell", "spell", "spell"))
        if how != "spell" and present:
            name = self.random.choice(present)
            value = {"null": None, "wrong": self.random.choice(_WRONG)}.get(how)
            value = _other(fields[name]) if how == "other" else value
        else:
            rotates = "rope_parameters" in fields
            known = [name for name in _SPELLINGS if name in fields or (rotates and "rope" in name)]
            every = [*_SPELLINGS]
            name = self.random.choice(self.random.choice((known or every,) * 5 + (every,)))
            value = self.random.choice(_SPELLINGS[name])
        if how == "remove" and present:
            del fields[name]
        else:
            fields[name] = value
        self.changes.append(f"{how} {where}{name}={value!r}")

    def outcome(self, written: dict[str, Any]) -> str:
        theirs = self.theirs(written)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                model = model_config(str(self.folder))
                arrays = named(load(str(self.folder), model))
        except UserError as error:
            if "\n" in str(error):
                raise self.difference(f"is refused in several lines: {error}") from error
            return f"refused ({str(error).removeprefix(str(self.folder))[:90]})"
        except Exception as error:
            raise self.difference(f"ends with {type(error).__name__}: {error}") from error
        if theirs:
            return theirs
        try:
            return f"equal ({folder_parity.logits(str(self.folder), model, arrays)[:30]})"
        except Exception as error:
            raise self.difference(f"{type(error).__name__}: {error}") from error

    def theirs(self, written: dict[str, Any]) -> str | None:
        """Returns the reason if transformers has no logits of the folder."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                model = parity.their_model(str(self.folder), written)
                batch = {"decoder_input_tokens": np.full((1, 9), 5)}
                if model.config.is_encoder_decoder or written["architectures"][0][-2:] != "LM":
                    batch["encoder_input_tokens"] = np.full((1, 9), 5)
                logits = parity.their_logits(model)(batch)[0]
        except Exception as error:
            return f"transformers has none ({str(error).splitlines()[:1]})"
        return None if np.isfinite(logits).all() else "transformers has NaN"

    def difference(self, text: str) -> Difference:
        return Difference(f"{self.name}: {text}; {', '.join(self.changes)}")

    def clean(self) -> None:
        shutil.rmtree(self.folder)


def _with(fields: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _with(value, drawn) if isinstance(value, dict) else drawn.get(name, value)
        for name, value in fields.items()
    }


def _parts(fields: dict[str, Any], where: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("vision_config", "id2label", "label2id"):
            found += [(f"{where}{name}.", value), *_parts(value, f"{where}{name}.")]
    return found


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value
    return value[::-1] if isinstance(value, list | str) else None


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Imports transformers once for all forks."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
