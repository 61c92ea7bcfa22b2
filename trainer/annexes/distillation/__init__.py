"""Learning from a teacher's probabilities."""
