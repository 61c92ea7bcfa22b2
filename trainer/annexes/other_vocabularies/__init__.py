"""Parameters that were trained with another vocabulary than the run's."""
