"""The commands as functions of Python; `palimpsest.NAME` is a name of `api`."""
