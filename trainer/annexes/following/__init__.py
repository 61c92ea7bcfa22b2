"""Training while the caches are being built (docs/decisions/021-train-while-it-builds.md)."""
