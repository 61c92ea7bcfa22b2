"""What a vocabulary becomes: fewer or other pieces, and the rows that they keep."""
