"""Holds jobset.yaml and kueue.yaml against the definitions that the projects publish, which no package brings.

    python -m tests.fleets.crds FOLDER/*.yaml

The files are `config/components/crd/bases/*.yaml` of kubernetes-sigs/jobset and kubernetes-sigs/kueue. A field that a
definition does not have is found too. Prints a line for each object, and exits with 1 if one does not fit.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.fleets.manifests import objects

MANIFESTS = ("jobset.yaml", "kueue.yaml")


def schemas(definitions: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """The schema of each apiVersion and kind."""
    found = {}
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # which Kubernetes checks by itself
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def strict(schema: Any) -> Any:
    """The schema as JSON Schema understands it, in which objects have the fields that are named and no others."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: strict(part) for name, part in schema.items()}
    if own.get("x-kubernetes-int-or-string"):
        own["type"] = ["integer", "string"]
    if isinstance(own.get("properties"), dict) and not own.get("x-kubernetes-preserve-unknown-fields"):
        own.setdefault("additionalProperties", False)
    return own


def faults(thing: Mapping[str, Any], known: Mapping[tuple[str, str], Any]) -> list[str]:
    """What does not fit, with where it stands."""
    schema = known.get((thing["apiVersion"], thing["kind"]))
    if schema is None:
        return [f"no definition of {thing['kind']} in {thing['apiVersion']} was given"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(thing)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("definitions", nargs="+", type=Path, metavar="FILE")
    given = parser.parse_args()
    known = schemas(yaml.safe_load(path.read_text()) for path in given.definitions)
    bad = 0
    for name in MANIFESTS:
        for thing in objects(name):
            found = faults(thing, known)
            print(f"{name} {thing['kind']}: {'; '.join(found) or 'fits'}")
            bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
