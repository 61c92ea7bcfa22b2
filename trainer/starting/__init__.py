"""What a run starts from: its own newest checkpoint, another model, or nothing."""
