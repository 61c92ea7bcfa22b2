"""`python -m trainer` lists the commands, as `palimpsest` does."""

import runpy

runpy.run_module("palimpsest", run_name="__main__", alter_sys=True)
