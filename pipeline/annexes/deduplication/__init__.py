"""Duplicates and contamination of a corpus: signatures, shared keys, clusters, exclude list.

datatrove and rensa do not fit: the list must have the same bytes for any number of workers and
after any kill, in bounded memory. datatrove's signatures alone take 82 times the CPU time of this
whole search (docs/benchmarks.md), and rensa keeps its signature index in one process's memory.
"""
