"""Questions about texts with a gap: their files, how they are made, and baselines."""
