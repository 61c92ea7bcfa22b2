"""One command line for all commands, without logic of its own."""
