"""Parts and presets of MARCH (2023), a zoo of T5 variants."""
