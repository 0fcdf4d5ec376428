"""See the file of this name in pallas_kernels, where the check of a device reads it too."""

from pallas_kernels.fast_compile import FAST_COMPILE

# For tests of memory: buffers are assigned before machine code is made.
UNOPTIMISED = {name: FAST_COMPILE[name] for name in FAST_COMPILE if name != "xla_cpu_use_fusion_emitters"}

__all__ = ["FAST_COMPILE", "UNOPTIMISED"]
