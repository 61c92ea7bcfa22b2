"""Files, local or in a store; network reads with retries."""
