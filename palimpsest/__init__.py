"""The front door: one command line for all commands. It owns no logic."""
