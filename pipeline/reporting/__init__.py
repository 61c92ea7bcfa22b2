"""Report on a cache: what is counted, and the HTML page."""
