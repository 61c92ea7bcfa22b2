"""Where two runs first differ: configuration, data, step, tensor."""
