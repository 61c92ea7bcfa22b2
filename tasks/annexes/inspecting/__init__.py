"""Windows and examples for human readers: traced to their documents and displayed."""
