"""The names of a model: by which rows of a job may ask for it, and the one that answers carry."""

import os
from collections.abc import Sequence

from ferrum_jax.io.paths import is_hub_id, is_url

_HUB = "models--"  # how folders of a hub's cache begin: models--ORG--NAME/snapshots/REVISION


def model_names(path: str, served: Sequence[str]) -> tuple[str, ...]:
    """Each once; answers carry the first. path: of the model, its URL or hub id. served: names that the user gives it.

    After those come its id if it is a hub's, in the cache too, its base name, the path as it was given, and folder and
    name, as hub ids are: ORG/NAME.
    """
    if is_hub_id(path):
        return tuple(dict.fromkeys((*served, path, path.split("/")[1])))
    parts = [part for part in (path if is_url(path) else os.path.abspath(path)).split("/") if part]
    hub = [part.removeprefix(_HUB).replace("--", "/", 1) for part in parts if part.startswith(_HUB)]
    return tuple(dict.fromkeys((*served, *hub, parts[-1], path, path.rstrip("/"), "/".join(parts[-2:]))))
