"""The format of caches (manifest, packing, records, row index) and random access to windows."""
