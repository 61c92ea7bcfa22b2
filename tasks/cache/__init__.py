"""The format of a cache: records, packing, index, manifest; windows read at random."""
