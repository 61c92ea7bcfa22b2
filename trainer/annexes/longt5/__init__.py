"""LongT5: transient-global attention, and presets."""
