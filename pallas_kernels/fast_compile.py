"""Options for a program that runs once and is compared with an oracle: to compile it is nearly all that it costs.

XLA's passes over the program are the same; machine code is made by the shorter way, and is not optimised. Goldens and
tests of bits run what users run.
"""

import jax

FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # later ones have no other emitters
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
