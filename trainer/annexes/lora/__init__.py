"""LoRA: low-rank additions to kernels, trained instead of them."""
