"""Writes the tables of docs/models.md: every architecture that is served and its published sizes, and what is refused.

    python -m scripts.models_page [--check]

The tables are what the registry, published configs and goldens say; tests/models/test_registry.py counts
the parameters on shapes. --check writes nothing and fails where a table differs.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import ENCODERS, FAMILIES, NOT_SERVED, encoder_spec_of, spec_of
from ferrum_jax.models.sharding.undivided import refusals
from ferrum_jax.models.spec import ModelSpec
from scripts import csv_tables
from scripts.published import PUBLISHED, PUBLISHED_ENCODERS

ROOT = Path(__file__).parent.parent
_TPS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    csv_tables.write(tables(), "models_page", check=parser.parse_args().check)


def tables() -> dict[str, csv_tables.Table]:
    """The tables by name."""
    head = ["architecture", "published size", "parameters", "layers"]
    return {
        "models": [[*head, "tp may be", "reference"], *rows()],
        "encoders": [[*head, "reference"], *encoder_rows()],
        "refused_models": [["model_type", "why"], *(list(item) for item in NOT_SERVED.items())],
    }


def rows() -> Iterator[list[str]]:
    """A row for each published size, by architecture and number of parameters."""
    goldens = goldens_by_architecture("*/config.json", "vision/*/config.json", "hearing/*/config.json")
    for architecture in FAMILIES:
        sizes = sorted((count, name) for name, (config, count) in published(architecture))
        shown = ", ".join(goldens.get(architecture, ["of its text model"]))
        for count, name in sizes:
            spec = spec_of(PUBLISHED[name][0])
            tps = ", ".join(map(str, meshes(spec)))
            yield [architecture, name, f"{count:,}", str(spec.num_hidden_layers), tps, shown]


def encoder_rows() -> Iterator[list[str]]:
    """A row for each published size of an encoder, and one for each architecture without."""
    goldens = goldens_by_architecture("encoders/*/config.json", "scorers/*/config.json")
    for architecture in ENCODERS:
        shown = ", ".join(goldens.get(architecture, ["of its kind"]))
        sizes = [item for item in PUBLISHED_ENCODERS.items() if item[1][0]["architectures"] == [architecture]]
        for name, (config, count) in sorted(sizes, key=lambda item: item[1][1]):
            yield [architecture, name, f"{count:,}", str(encoder_spec_of(config).num_hidden_layers), shown]
        if not sizes:
            yield [architecture, "", "", "", shown]


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
        found.setdefault(architecture, []).append(config.parent.name)
    return found


if __name__ == "__main__":
    main()
