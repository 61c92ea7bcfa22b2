"""What a group that trains on DNA adds to Palimpsest: annex.toml says what and where."""
