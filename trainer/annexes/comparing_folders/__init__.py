"""A folder in --init_from=hf: against what transformers computes with it."""
