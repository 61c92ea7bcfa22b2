"""Conversion of checkpoints between T5X, Mesh TensorFlow, transformers and this trainer."""
