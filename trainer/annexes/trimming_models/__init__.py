"""Models cut to the pieces of a vocabulary that a text needs."""
