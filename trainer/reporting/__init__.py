"""Reports of a run: metrics, speed, profile, start-up text, software versions."""
