"""Opens trained runs, as functions from text to text and for reports."""
