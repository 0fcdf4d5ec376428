"""The device boundary: buckets, packed inputs, the step function, and the runner that calls it."""
