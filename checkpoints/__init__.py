"""Checkpoints: weights from a folder on disk to device arrays, one tensor at a time.

`open_checkpoint(path)` recognises a Hugging Face folder (config.json + safetensors), one of a hub, or our own folder
(ferrum_jax.json + Orbax arrays) and reads the files beside the weights; `Checkpoint.load` reads the weights.
`convert` turns a Hugging Face folder into our own. `Rule` is a line of a family's weight table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints.adapters.lora import Adapter
    from checkpoints.checkpoint import Checkpoint, open_checkpoint, read_adapter, stored_forms
    from checkpoints.conversion import CastError, ConvertSummary, convert
    from checkpoints.export import to_huggingface
    from checkpoints.fingerprints import fingerprint
    from checkpoints.rules import CLASSES, Expansion, Rule, TensorSlice

_NAMES = {
    "adapters.lora": ("Adapter",),
    "checkpoint": ("Checkpoint", "open_checkpoint", "read_adapter", "stored_forms"),
    "conversion": ("CastError", "ConvertSummary", "convert"),
    "export": ("to_huggingface",),
    "fingerprints": ("fingerprint",),
    "rules": ("CLASSES", "Expansion", "Rule", "TensorSlice"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Public names on first use: what reads weights brings jax, and the command line needs their descriptions alone."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"checkpoints.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
