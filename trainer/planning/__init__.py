"""Plans of a run: its programs compiled ahead of time, and what the compiler says of them."""
