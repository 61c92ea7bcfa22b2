"""What a run leaves behind: checkpoints, their metadata, and the state of early stopping."""
