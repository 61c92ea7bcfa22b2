"""C code of the pipeline, compiled while the package is installed (see hatch_build.py)."""
