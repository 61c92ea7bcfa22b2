"""Batches over the network: `palimpsest serve`, and palimpsest.batches("grpc://HOST:PORT")."""
