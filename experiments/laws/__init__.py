"""Scaling laws: fits of losses over steps, parameters and tokens, with intervals."""
