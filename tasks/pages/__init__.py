"""HTML pages of the project: one style, escaped text, charts, and no need for a network."""
