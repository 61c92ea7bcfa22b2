"""Where pieces are worked on: engines by name, local workers, parts, secrets."""
