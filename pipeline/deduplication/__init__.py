"""Duplicates and contamination of a corpus: signatures, shared keys, clusters, exclude list.

Written here and not left to datatrove or rensa, because the list must have the same bytes for any
number of workers and after any kill, in bounded memory: datatrove's signatures alone take 82 times
the processor time of our whole search (docs/benchmarks.md), and rensa keeps its index of signatures
in the memory of one process.
"""
