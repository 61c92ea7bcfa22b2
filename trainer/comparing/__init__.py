"""The first difference of two runs: configuration, data, step, tensor."""
