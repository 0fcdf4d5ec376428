"""Kernels that a compiler refuses: a sentence for a person, and all that the compiler says in a file.

An engine whose attention was checked at its start never comes here, unless another bucket's tiles are refused.
"""

import importlib.metadata
import re
import tempfile
import traceback
from typing import Any

import jax

_KERNELS = ("paged_attention_decode", "prefill_attention", "kv_write_scales", "kv_write")
_OF_A_KERNEL = re.compile("|".join(("mosaic", "pallas", "tpu_custom_call", *_KERNELS)), re.IGNORECASE)
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
_MAX_WORDS = 200  # characters of what the compiler says first


class RefusedKernel(ValueError):
    """A compiler refused a kernel, and says why in a file."""


def is_of_kernel(error: Exception) -> bool:
    """Whether a compiler's error is about a kernel. Memory of the whole device that lacks is not, though a list of what
    takes it names kernels too."""
    text = str(error)
    if text.startswith("RESOURCE_EXHAUSTED") and not re.search("vmem|smem|shared memory", text):
        return False
    return _OF_A_KERNEL.search(text) is not None


def refused_kernel(error: Exception, program: str, kernels: str, device: Any) -> RefusedKernel:
    """The sentence. program: a few words for what was compiled. kernels: its kernels with their shapes."""
    text = str(error)
    name = next((name for name in _KERNELS if re.search(rf"\b{name}\b", text)), "a kernel")
    words = " ".join(text.split())[:_MAX_WORDS] or type(error).__name__
    path = keep_report("".join(traceback.format_exception(error)))
    versions = f"jax {jax.__version__}{_compiler(device.platform)}"
    return RefusedKernel(
        f"{name} does not compile for {device.device_kind}, in the {program} with {kernels}, with {versions}: {words}; "
        f"take implementation 'xla', and report what {path} holds"
    )


def _compiler(platform: str) -> str:
    """ ", libtpu 0.0.42" and the like, of what is installed."""
    for name in _COMPILERS.get(platform, ()):
        try:
            return f", {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def keep_report(text: str) -> str:
    """The path of a new file with the text, among the system's temporary ones; only its owner may read it."""
    number, path = tempfile.mkstemp(prefix="ferrum_jax_", suffix=".txt")
    with open(number, "w", encoding="utf-8") as file:
        file.write(text)
    return path
