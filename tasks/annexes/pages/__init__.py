"""HTML pages that share one style, escape text, draw charts and need no network."""
