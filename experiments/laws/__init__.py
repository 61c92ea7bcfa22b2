"""Laws: fits of losses over steps, parameters and tokens, and mixtures, with intervals."""
