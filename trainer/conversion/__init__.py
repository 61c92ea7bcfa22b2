"""Conversion of checkpoints between T5X, Mesh TensorFlow, transformers and this trainer."""

from trainer.huggingface import hub, require_packages, weights


def check(format: str, vocabulary: str | None, shard_size: str | None, push_to: str | None) -> int:
    """Returns the largest size of a weights file in bytes.

    Raises:
      UserError: a package is missing, the size cannot be read, or `push_to` is invalid or lacks
        a token.
    """
    wanted = ["safetensors", "huggingface_hub"] if format == "huggingface" else []
    wanted += ["sentencepiece", "tokenizers"] if vocabulary else []
    require_packages(wanted, f"converting to {format}")
    if push_to:
        hub.check(push_to)
    return weights.size(shard_size or "5GB")
