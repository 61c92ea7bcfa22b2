"""The fields of a config.json: those that were read, those without effect, and all others."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from tasks.terminal.command_line import UserError

# transformers' synonyms for activations.
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
# Fields with no effect on the logits of a model that we read. Dropout is the run's own.
# Source: transformers 4.57 and 5.23, `configuration_utils.py` and the configurations of the models
# in `formats.KINDS`, and fields of older releases in folders on the Hub.
# In order: ids (which `special_ids` reads) and texts; descriptions; how a model is run; initial
# values, dropout and other heads; generation; lengths that are no table's size.
_NAMES = """
bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id cls_token_id
mask_token_id unk_token_id prefix tokenizer_class

_name_or_path name_or_path _commit_hash architectures dtype torch_dtype transformers_version
transformers.js_config finetuning_task task_specific_params problem_type id2label label2id
num_labels _num_labels model_type is_llama_config unsloth_version unsloth_fixed

use_cache output_attentions output_hidden_states output_past return_dict use_return_dict
torchscript tf_legacy_loss use_bfloat16 xla_device gradient_checkpointing pretraining_tp
chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_internal
_attn_implementation_autoset _flash_attn_2_enabled is_composition is_encoder_decoder
keys_to_ignore_at_inference reorder_and_upcast_attn experts_implementation _experts_implementation
cache_implementation

initializer_range initializer_factor attention_dropout attention_probs_dropout_prob
hidden_dropout_prob dropout_rate resid_pdrop embd_pdrop attn_pdrop classifier_dropout
classifier_dropout_prob summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
pooler_size_per_head pooler_type directionality predict_special_tokens

max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens

max_position_embeddings max_sequence_length model_max_length n_positions n_ctx
"""
_INERT = frozenset(_NAMES.split())
# Types of fields, in messages.
_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
# Number of unknown fields in a message, and characters of a value.
_NAMED, _SHOWN = 3, 40


class Fields:
    """The non-null fields of a config.json, and names of the others; remembers which were read."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        where: str,
        tensors: Collection[str],
        nulls: Collection[str] = (),
    ):
        self._fields, self.where, self.tensors, self._nulls = dict(fields), where, tensors, nulls
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self._fields:
            raise UserError(f"{self.where} has no field {name}")
        return self._fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def sizes(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns the named sizes and the vocabulary's, under our names."""
        names = {**names, "vocab_size": "vocab_size"}
        return {ours: self.size(theirs) for theirs, ours in names.items()}

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a whole number above 0; without a default, the file must have it."""
        found = self[name] if default is None else self.get(name, default)
        if self._checked(name, found, int) < 1:
            raise UserError(f"{self.where}: {name} is {found}: it must be above 0")
        return int(found)

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number; without a default, the file must have it."""
        found = self[name] if default is None else self.get(name, default)
        return float(self._checked(name, found, float))

    def section(self, name: str) -> dict[str, Any]:
        """Returns a field that holds fields of its own."""
        return dict(self._checked(name, self[name], dict))

    def get(self, name: str, default: Any) -> Any:
        """Returns a field's value, which must be of the default's type unless that is None."""
        self._read.add(name)
        found = self._fields.get(name, default)
        return found if default is None else self._checked(name, found, type(default))

    def nullable(self, name: str, default: float | None) -> Any:
        """Returns a number; None if the file says null, `default` if it lacks the field."""
        if name in self._nulls:
            return None
        found = self.get(name, default)
        return found if found is None else self._checked(name, found, float)

    def _checked(self, name: str, found: Any, kind: type) -> Any:
        """Returns `found`; raises a UserError if it is not of a kind of _KINDS."""
        expected = (int, float) if kind is float else kind
        if isinstance(found, expected) and (kind is bool or not isinstance(found, bool)):
            return found
        advice = f"it must be {_KINDS[kind]}"
        if kind in (int, float) and is_number(found):
            advice = "write numbers without quotes"
        raise UserError(f"{self.where}: {name} is {_short(found)}: {advice}")

    def present(self, name: str) -> dict[str, Any]:
        """Returns the field by its name; {} if there is none."""
        value = self.get(name, None)
        return {} if value is None else {name: value}

    def require(self, name: str, expected: Any, default: Any = None) -> None:
        """Refuses a value other than `expected`; `default` is transformers', if it differs."""
        found = self.get(name, expected if default is None else default)
        if found != expected:
            raise UserError(f"{self.where}: {name} is {found}; our models have {expected}")

    def named(self, name: str, known: Mapping[Any, str], default: Any = None) -> Any:
        """Returns our name for a field's value."""
        found = self.get(name, default)
        for ours, theirs in known.items():
            if theirs == _SYNONYMS.get(str(found), found):
                return ours
        raise UserError(f"{self.where}: {name} is {found}, not one of {', '.join(known.values())}")

    def refuse_unknown(self, inert: Collection[str]) -> None:
        """Raises a UserError if there are fields that were not read and may have an effect.

        `inert` are fields without effect in this type of model.
        """
        inert = _INERT | {*inert} | self._read
        unknown = [
            f"{name} is {_short(v)}" for name, v in self._fields.items() if name not in inert
        ]
        if unknown:
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            one = len(unknown) == 1
            raise UserError(
                f"{self.where}: {', '.join(unknown[:_NAMED])}{more}: "
                f"{'this field is' if one else 'these fields are'} unknown here and may change "
                f"what the model computes; remove {'it' if one else 'them'} from the file if "
                f"{'it does' if one else 'they do'} not"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def unset(value: Any) -> bool:
    """Returns whether a field's value means that there is none, as null and [] do."""
    return value is None or value in ({}, [])


def is_number(value: Any) -> bool:
    """Returns whether a value is a quoted number, which transformers never writes."""
    return isinstance(value, str) and re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value) is not None
