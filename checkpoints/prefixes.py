"""A saved prefix cache: what pools keep by its keys, as a folder that another process restores.

    prefixes.json    format version, what the keys belong to, the names of the arrays, the digest of every file of
                     arrays/, and its own digest
    arrays/          Orbax: for group g `g/keys` [n, 16] uint8 and for layer l `g/l/values` [n, C, 2K, H] (and, for
                     int8, `g/l/scales` [n, 2K, C]); `prompts/keys` and `prompts/hidden` [n, D]; `states/keys` and
                     for recurrent layer l `states/l` [n, ...], or `states/l/NAME` of each of its arrays. Where an
                     engine gives experts, `experts/kept` [n, C, layers * X] has those of tokens in one group's blocks

Rows stand from the least recently used block to the most recently used one. Nothing here depends on the mesh,
on ids or on how the pools are packed. A folder appears whole or not at all.

`invariant` of what the keys belong to says whether the blocks have the bits of invariant mode. An engine in that mode
takes no others; any other engine takes both. `experts` says in the same way whether the experts of the blocks' tokens
are there. Folders without a field count as if it was false.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.file_names import name_inside
from checkpoints.folder import new_folder
from checkpoints.orbax_folder import check_free, restore_arrays, save_arrays
from ferrum_jax.io.files.json_files import read_json

FORMAT = 1
DESCRIPTION = "prefixes.json"
ARRAYS = "arrays"
_NEEDS = {  # of some engines, and what becomes of rows that use a folder without it
    "invariant": "invariant mode: rows that use them would have other bits than rows that compute theirs; save them "
    "with `cache save --invariant`, or run with --no-invariant, in Python EngineConfig(invariant=False)",
    "experts": "return_routed_experts: rows that use them would lack the experts of their first tokens; save them with "
    "EngineConfig(return_routed_experts=True), or load them without it",
}


def save_prefixes(path: Path, identity: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the folder, atomically. identity: JSON values, equal where it is restored but for those of _NEEDS.

    Raises ValueError when `path` is there and not an empty folder.
    """
    check_free(path)
    with new_folder(path) as temporary:
        save_arrays(temporary / ARRAYS, arrays)
        description = {
            "format": FORMAT,
            "identity": dict(identity),
            "arrays": sorted(arrays),
            "files": _file_digests(temporary / ARRAYS),
        }
        description["digest"] = _digest(description)
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def load_prefixes(path: Path, identity: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a folder, every byte checked.

    Raises ValueError naming the folder and what differs, for one of another model, dtype or block size, for one that
    lacks what the engine needs, for one that is damaged, and where there is none.
    """
    if not (path / DESCRIPTION).is_file():
        raise ValueError(f"{path} holds no saved prefixes: it has no {DESCRIPTION}; name a folder of `cache save`")
    description = read_json(path / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{path} has prefix cache format {description.get('format')!r}, this version reads {FORMAT}; save the "
            "prefixes again"
        )
    if description.pop("digest", None) != _digest(description):
        raise ValueError(f"{path / DESCRIPTION} is damaged; save the prefixes again")
    _check_identity(path, description["identity"], identity)
    found = _file_digests(path / ARRAYS)
    damaged = sorted(name for name, digest in description["files"].items() if found.get(name) != digest)
    if damaged:
        raise ValueError(f"{path / ARRAYS} is damaged, changed or missing are {damaged}; save the prefixes again")
    return restore_arrays(path / ARRAYS, [name_inside(name, path / DESCRIPTION) for name in description["arrays"]])


def _check_identity(path: Path, saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} is {saved.get(name)!r} there and {identity.get(name)!r} here"
        for name in sorted((saved.keys() | identity.keys()) - {*_NEEDS})
        if saved.get(name) != identity.get(name)
    ]
    if wrong:
        raise ValueError(f"{path} holds prefixes of another engine: {'; '.join(wrong)}; save them with this one")
    for need, why in _NEEDS.items():
        if identity.get(need) and not saved.get(need):
            raise ValueError(f"{path} holds prefixes that were computed without {why}")


def _file_digests(folder: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with open(file, "rb") as opened:
            digests[file.relative_to(folder).as_posix()] = hashlib.file_digest(opened, "blake2b").hexdigest()
    return digests


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16).hexdigest()
