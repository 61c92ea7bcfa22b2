"""What the functions of `palimpsest.api` take and return: documents, places, data frames."""
