"""One update over a mesh of devices: program, step, loss, guard, sharding, processes."""
