"""Questions made from a corpus."""
