"""What runs report: metrics, speed, profiles, start-up text, software versions."""
