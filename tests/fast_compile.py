"""See the file of this name in pallas_kernels, where the check of a device reads it too."""

from pallas_kernels.fast_compile import FAST_COMPILE

__all__ = ["FAST_COMPILE"]
