"""Supervised tasks in T5's format, which makes pairs of texts from a data set's rows."""
