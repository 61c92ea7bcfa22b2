"""Parts and presets of yurakuratov/t5-experiments."""
