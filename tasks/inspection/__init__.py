"""Windows and examples for people: decoded, traced to their documents, shown."""
