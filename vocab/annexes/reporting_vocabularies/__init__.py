"""Reports on how well vocabularies fit corpora."""
