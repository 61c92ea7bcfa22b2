"""The report on a cache: statistics and HTML page."""
