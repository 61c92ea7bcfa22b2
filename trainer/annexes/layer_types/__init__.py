"""The field layer_types of transformers, which several families have."""
