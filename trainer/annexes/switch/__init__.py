"""Switch Transformers."""
