"""Arguments and results of the functions of `palimpsest.api`: documents, places, data frames."""
