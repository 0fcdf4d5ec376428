"""Recipes of goldens, written where a checkpoint was saved: which tensors it has, and what each is drawn from."""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from scripts.goldens.weights import ENDING

Said = dict[str, Any]  # of a tensor, in a recipe
Answer = TypeVar("Answer")
Law = Callable[[str, tuple[int, ...]], Said]
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def normal(mean: float, deviation: float) -> Said:
    """A law of weights."""
    return {"normal": [mean, float(f"{deviation:.4g}")]}


def uniform(low: float, high: float) -> Said:
    """A law of scales."""
    return {"uniform": [float(f"{end:.4g}") for end in (low, high)]}


def replace_weights(folder: Path, seed: int, law: Law, tied: Mapping[str, str] = MappingProxyType({})) -> None:
    """Puts recipes in place of all safetensors files of a folder. tied: names of tensors that are drawn as others."""
    for path in sorted(folder.rglob("*.safetensors")):
        write_recipe(path.with_name(f"{path.name}.json"), seed, described(path, law, tied))
        path.unlink()


def described(path: Path, law: Law, tied: Mapping[str, str]) -> dict[str, Said]:
    """What a recipe says of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found = {}
    for name, said in sorted(header.items()):
        drawn = law(tied.get(name, name), tuple(said["shape"])) | ({"name": tied[name]} if name in tied else {})
        found[name] = {"dtype": _DTYPES[said["dtype"]], "shape": said["shape"], **drawn}
    return found


def write_recipe(path: Path, seed: int, tensors: dict[str, Said]) -> None:
    """One line for tensors that differ in numbers of layers and experts alone."""
    lines = [f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in folded(tensors)]
    path.write_text(f'{{"seed": {seed}, "tensors": {{\n' + ",\n".join(lines) + "\n}}\n")


def folded(tensors: dict[str, Said]) -> list[tuple[str, Said]]:
    """Patterns of names with what is said of all of them."""
    alike: dict[str, list[str]] = {}
    for name, said in tensors.items():
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".#", name) + json.dumps(said), []).append(name)
    found = []
    for names in alike.values():
        parts = [re.split(r"(?<=\.)(\d+)(?=\.)", name) for name in names]
        columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
        is_whole = len(names) == math.prod(map(len, columns))
        pattern = "".join(c[0] if len(c) == 1 else "{" + ",".join(c) + "}" for c in columns)
        found += [(name, tensors[names[0]]) for name in ([pattern] if is_whole else names)]
    return found


def set_seed(folder: Path, seed: int) -> None:
    """Draws all weights of a folder anew."""
    for path in folder.rglob(f"*{ENDING}"):
        path.write_text(re.sub(r'^{"seed": \d+', f'{{"seed": {seed}', path.read_text()))


def first_seed(folder: Path, first: int, answer: Callable[[], Answer | None]) -> Answer:
    """Draws a folder's weights with one seed after another until there is an answer for them."""
    seed = first
    set_seed(folder, seed)
    while (found := answer()) is None:
        seed += 1
        set_seed(folder, seed)
    print(f"  seed {seed}")
    return found
