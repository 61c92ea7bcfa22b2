"""Vocabularies that gain pieces from another corpus."""
