"""Writes docs/models.md: every architecture that is served, its published sizes and what their weights take.

    python -m scripts.models_page [--check]

The page is what the registry, published configs and goldens say; tests/models/test_registry.py counts
the parameters on shapes. --check writes nothing and fails where the page differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from ferrum_jax.models.registry import ENCODERS, FAMILIES, NOT_SERVED, encoder_spec_of, spec_of
from ferrum_jax.sharding.undivided import refusals
from ferrum_jax.sizes.mesh_shape import MeshShape
from ferrum_jax.spec import ModelSpec
from scripts.published import PUBLISHED, PUBLISHED_ENCODERS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
_TPS = (1, 2, 4, 8, 16, 32, 64)
_HEAD = """# Models that are served

Made by `python -m scripts.models_page` from the registry, the published configs of the tests and the goldens. Tests
count the parameters on the shapes that each config gives here; in bfloat16 each takes two bytes. `tp` may be what
divides heads, widths and experts, up to 64; whether the weights fit a device is what `ferrum-jax plan` says.
[Models](reference/models.md) says what `--model` takes.

| architecture | published size | parameters | layers | `tp` may be | reference |
|---|---|---|---|---|---|
"""
_ENCODERS = """
## Encoders

They make vectors of texts, or score pairs of them. The parameters are those that decide a vector: without pooler and
heads. Where no size stands, the architecture is read as the others of its kind.

| architecture | published size | parameters | layers | reference |
|---|---|---|---|---|
"""
_TAIL = """
The reference is `transformers`, on tiny models with random weights, which the last column names: every layer's output
and 64 greedy tokens of seven prompts agree, and of encoders the vectors or scores. Weights may be float32, bfloat16 or
float16, or in a form that [Models](reference/models.md) names.

## What is refused

A key of `config.json` that is not understood is an error that names it, for it may change the result. Beyond that:

| what | why |
|---|---|
| DeepSeek-V4 | it compresses keys and joins several residual streams, which is not served yet |
| Mamba2 with norms before its gate; experts of a latent (Nemotron-3 Super) | not served yet |
{not_served}| `clip_qkv` of OLMoE | no released OLMoE clips |
| sounds of others than [these](guides/sounds.md) | the text part, where the table names it |
| images and videos of others than [these](guides/images.md) | likewise |
"""


def main() -> None:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif PAGE.read_text() != made:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} differs; run python -m scripts.models_page")


def page() -> str:
    """The page's text."""
    not_served = "".join(f"| `{model_type}` | {why} |\n" for model_type, why in NOT_SERVED.items())
    return _HEAD + "".join(rows()) + _ENCODERS + "".join(encoder_rows()) + _TAIL.format(not_served=not_served)


def rows() -> Iterator[str]:
    """A row for each published size, by architecture and number of parameters."""
    goldens = goldens_by_architecture("*/config.json", "vision/*/config.json", "hearing/*/config.json")
    for architecture in FAMILIES:
        sizes = sorted((count, name) for name, (config, count) in published(architecture))
        shown = ", ".join(goldens.get(architecture, ["of its text model"]))
        for count, name in sizes:
            spec = spec_of(PUBLISHED[name][0])
            tps = ", ".join(map(str, meshes(spec)))
            yield f"| `{architecture}` | {name} | {count:,} | {spec.num_hidden_layers} | {tps} | {shown} |\n"


def encoder_rows() -> Iterator[str]:
    """A row for each published size of an encoder, and one for each architecture without."""
    goldens = goldens_by_architecture("encoders/*/config.json", "scorers/*/config.json")
    for architecture in ENCODERS:
        shown = ", ".join(goldens.get(architecture, ["of its kind"]))
        sizes = [item for item in PUBLISHED_ENCODERS.items() if item[1][0]["architectures"] == [architecture]]
        for name, (config, count) in sorted(sizes, key=lambda item: item[1][1]):
            yield f"| `{architecture}` | {name} | {count:,} | {encoder_spec_of(config).num_hidden_layers} | {shown} |\n"
        if not sizes:
            yield f"| `{architecture}` | | | | {shown} |\n"


def published(architecture: str) -> Iterator[tuple[str, tuple[dict, int]]]:
    """The published sizes of an architecture: (name, (config, number of parameters))."""
    return (item for item in PUBLISHED.items() if item[1][0]["architectures"] == [architecture])


def meshes(spec: ModelSpec) -> list[int]:
    """The powers of two that tp may be, each data shard with all experts."""
    return [tp for tp in _TPS if not refusals(spec, MeshShape(dp=1, tp=tp))]


def goldens_by_architecture(*patterns: str) -> dict[str, list[str]]:
    """Names of the goldens of each architecture. patterns: of their configs."""
    found: dict[str, list[str]] = {}
    folder = ROOT / "tests" / "goldens"
    for config in sorted(config for pattern in patterns for config in folder.glob(pattern)):
        (architecture,) = json.loads(config.read_text())["architectures"]
        found.setdefault(architecture, []).append(f"`{config.parent.name}`")
    return found


if __name__ == "__main__":
    main()
