"""Plans of a run: its programs, compiled ahead of time, and the compiler's estimates."""
