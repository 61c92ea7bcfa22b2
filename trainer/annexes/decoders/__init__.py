"""Decoders that people continue from."""
