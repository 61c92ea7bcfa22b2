"""Changes to a vocabulary's pieces, and the table rows that they keep."""
