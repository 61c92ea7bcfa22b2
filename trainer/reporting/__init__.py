"""What a run reports: metrics, speed, profile, start-up text, software versions."""
