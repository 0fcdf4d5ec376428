"""Tiles of attention kernels as a config names them: a text such as "tile_kv=256,items=2"."""

import re
from collections.abc import Mapping


def tiles_of(text: str | None) -> dict[str, int]:
    """The tiles of a text such as "tile_kv=256,items=2". Raises ValueError where it is none."""
    if text is None:
        return {}
    if not re.fullmatch(r"[a-z_]+=[1-9]\d{0,6}(,[a-z_]+=[1-9]\d{0,6})*", text):
        raise ValueError(f"attention_tiles is {text!r}; it must name numbers of tiles, such as 'tile_kv=256,items=2'")
    parts = [part.split("=") for part in text.split(",")]
    found = {name: int(size) for name, size in parts}
    if len(found) < len(parts):
        raise ValueError(f"attention_tiles is {text!r}; it must name each tile once, as 'tile_kv=256,items=2' does")
    return found


def tiles_text(tiles: Mapping[str, int]) -> str:
    """The text that `tiles_of` reads."""
    return ",".join(f"{name}={size}" for name, size in sorted(tiles.items()))
