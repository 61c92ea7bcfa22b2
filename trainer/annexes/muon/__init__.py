"""The optimizer Muon."""
