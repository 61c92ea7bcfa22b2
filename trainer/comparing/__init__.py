"""The first difference between two runs: configuration, data, step, tensor."""
