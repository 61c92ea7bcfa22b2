"""Additions of a group that trains on DNA; annex.toml lists them."""
