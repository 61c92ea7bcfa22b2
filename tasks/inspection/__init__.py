"""Windows and examples for human readers: decoded, traced to their documents and displayed."""
