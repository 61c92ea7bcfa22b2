"""Encoders that people continue from."""
