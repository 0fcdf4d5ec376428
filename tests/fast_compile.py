"""See the file of this name in pallas_kernels, where the check of a device reads it too."""

from pallas_kernels.fast_compile import FAST_COMPILE

UNOPTIMISED = {"xla_backend_optimization_level": 0}  # for tests of memory: buffers are assigned before machine code is

__all__ = ["FAST_COMPILE", "UNOPTIMISED"]
