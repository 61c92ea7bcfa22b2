"""Reports of runs: metrics, speed, profiles, start-up text, software versions."""
