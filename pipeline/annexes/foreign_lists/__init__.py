"""Exclude lists made from other patterns, copies or sets of languages of a corpus."""
