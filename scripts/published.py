"""Published models: the config.json of each and its number of parameters, as tests/published/ has them.

A file holds the models of one architecture. A config is the one that the authors published with the weights, or the
copy that "source" names, some without keys that change nothing here. Parameters are counted by the authors, or by the
reference implementation built without memory from the same values: without the layers that predict several tokens;
with a tower where the config has one; of encoders without pooler and heads. Models with "fast" stand for their kind in
the fast tests. Left out, for no source shows their values in full: Phi-3-medium-128k (its lists of factors), Llama 1,
Qwen2-0.5B, -1.5B and -72B, Ministral-8B, BERT-large, BGE-base and -large, E5, XLM-RoBERTa-base. Refused, for attention
in two chunks is not served: Qwen2.5-7B-1M and -14B-1M.
"""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent.parent / "tests" / "published"


def _models(pattern: str) -> dict[str, dict[str, Any]]:
    files = sorted(_FOLDER.glob(pattern))
    return {name: model for file in files for name, model in json.loads(file.read_text()).items()}


def _counted(models: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], int]]:
    return {name: (model["config"], model["parameters"]) for name, model in models.items()}


_DECODERS = _models("*.json")
PUBLISHED = _counted(_DECODERS)  # (config, number of parameters) by name
PUBLISHED_ENCODERS = _counted(_models("encoders/*.json"))
FAST = tuple(name for name, model in _DECODERS.items() if model.get("fast", False))


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a published model."""
    return (PUBLISHED | PUBLISHED_ENCODERS)[name][0]
