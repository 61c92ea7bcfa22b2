"""Supervised tasks in T5's format: pairs of texts made from a data set's rows."""
