"""The device boundary: buckets, packed inputs, the step function, its executables, and who runs them."""
