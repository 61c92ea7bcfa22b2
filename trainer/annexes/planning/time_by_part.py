"""The parts of a step to which times and bytes are assigned, by operation name."""

import re

ATTENTION = "attention"
FEED_FORWARD = "feed-forward"
LOGITS = "logits and loss"
EMBEDDING = "embedding and norms"
OPTIMIZER = "optimizer"
COLLECTIVES = "collectives"
# Storing each layer's activations for the backward pass in stacks, and reading them back.
SCAN = "stacks of the scan"
# Waiting for copies between HBM and the chip's own memory that the compiler started too late.
COPIES = "copies"
# Starting a GPU's kernels.
LAUNCHES = "launches"
REST = "rest"
PARTS = (
    *(ATTENTION, FEED_FORWARD, LOGITS, EMBEDDING, OPTIMIZER, COLLECTIVES, SCAN, COPIES, LAUNCHES),
    REST,
)

# Parts by module; the innermost path component in this table decides.
_MODULES = {
    "attention": ATTENTION,
    "self_attention": ATTENTION,
    "encoder_decoder_attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "logits_dense": LOGITS,
    "logits": LOGITS,
    "order_head": LOGITS,
    "token_embedder": EMBEDDING,
    "memory_embedder": EMBEDDING,
    "position_embedder": EMBEDDING,
    "encoder_norm": EMBEDDING,
    "decoder_norm": EMBEDDING,
}
_BIAS = re.compile(r"relpos_bias(_\d+)?$")
_NORM = re.compile(r"(pre|post)?_?\w*layer_norm$")
_STACKS = re.compile(r"/while/body/(closed_call/)?(jit\()?dynamic_(update_)?(index|slice)")
# A path through the differentiated function: `jvp(Transformer)`, `transpose(jvp(Encoder))`.
_OF_MODEL = re.compile(r"\bjvp\((\w[^)]*)\)")
# The loss is no module; its kernel has a name.
_OF_LOSS = re.compile(r"\bjvp\((logit_statistics)?\)")
# Evaluations do not differentiate: the path starts with the model's class.
_CLASSES = ("Transformer", "Encoder")


def part_of(op_name: str) -> str:
    """Returns an operation's part from its path, such as "jit(train_step)/jvp(Transformer)/…"."""
    components = op_name.split("/")
    for component in reversed(components):
        if component in _MODULES:
            return _MODULES[component]
        if _BIAS.match(component):
            return ATTENTION
        if _NORM.match(component):
            return EMBEDDING
    if _STACKS.search(op_name):
        return SCAN
    if _OF_LOSS.search(op_name):
        return LOGITS
    inside = any(each.partition(".")[0] in _CLASSES for each in components)
    if _OF_MODEL.search(op_name) or inside:
        # In the model but in no module above: casts, masks, a scan's copies. Logits
        # that share the embedding's table are products in the stack itself.
        return REST
    if "jit(train_step)" in op_name:
        return OPTIMIZER
    return LOGITS if "jit(evaluation_step)" in op_name else REST
