"""What a run does, and who hears of it: wall time, hangs and a command for events."""
