"""The start of a run: from its own newest checkpoint, another model, or nothing."""
