"""The pieces of a vocabulary that a text needs, with their rows renumbered."""
