"""Models of a hub, named by ids such as "Qwen/Qwen3-0.6B": one commit as a folder in huggingface_hub's cache.

A revision (a branch, a tag or a commit) is resolved to a commit first, and all files are of that commit. The files that
stand beside weights are fetched, then the safetensors that are read, and nothing else: pickles run code when they are
read. The library itself reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoints.folder import COMPANIONS, dense_weights, sentence_modules
from checkpoints.huggingface import INDEX, SINGLE, weight_files
from ferrum_jax.io.paths import is_hub_id

Show = Callable[[str, int, int], None]


def _silent(what: str, done: int, total: int) -> None:
    pass


_COMMIT = re.compile(r"[0-9a-f]{40}")
_MB = 10**6


def commit_of(model: str, revision: str | None = None) -> str | None:
    """The commit that a hub's model has at `revision`, by default its main branch; None for a path or URL.

    Without a connection it is the commit that the cache knows. Raises ValueError if there is none, or if a revision is
    given for a path or URL.
    """
    if not is_hub_id(model):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, and {model} is a path or URL here; revisions are of a hub's models, named "
                "ORG/NAME: leave it out"
            )
        return None
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    return _fetch(model, revision, ["config.json"]).name


def model_folder(
    model: str, revision: str | None = None, *, weights: bool = True, on_progress: Show | None = None
) -> str:
    """Where the files of a model are: a path or URL as it is; for a hub's model, the folder they were fetched into.

    weights: False leaves them out. on_progress: called with (what, done, total); None shows the library's own bars
    where there is a terminal. Raises ValueError for what cannot be fetched and is not in the cache.
    """
    commit = commit_of(model, revision)
    if commit is None:
        return model
    folder = _fetch(model, commit, [*COMPANIONS, INDEX])
    places = [place / "config.json" for _, place in sentence_modules(folder) if place != PurePosixPath()]
    needed = [*weight_files(folder), *dense_weights(folder)] if weights else []
    wrong = [name for name in needed if not name.endswith(".safetensors")]
    if wrong:
        raise ValueError(f"{INDEX} of {model} names {', '.join(wrong[:3])}; only safetensors are fetched")
    if places or needed:
        show = on_progress or (None if sys.stderr.isatty() else _silent)
        _fetch(model, commit, [*map(str, places), *needed], show)
    for name in ("config.json", *needed):
        if not (folder / name).is_file():
            what = f"{SINGLE} or {INDEX}" if name == SINGLE else name
            raise ValueError(
                f"{model} has no {what} at commit {commit}, or the cache lacks it and the hub cannot be reached; a "
                "model needs a config.json and safetensors, and weights in other formats must first be saved as those"
            )
    return str(folder)


def _fetch(model: str, revision: str | None, names: Sequence[str], on_progress: Show | None = _silent) -> Path:
    """The cache's folder of a commit, with the named files as far as the model has them."""
    import huggingface_hub

    bars = {} if on_progress is None else {"tqdm_class": _bars_for(on_progress)}
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=[glob.escape(name) for name in names], **bars
            )
        )
    except Exception as error:  # the errors of the library and of its HTTP client share no narrower class
        raise ValueError(f"{model} is not a folder here, and {_why(error, revision)}") from error


def _why(error: Exception, revision: str | None) -> str:
    """Why a hub's model cannot be had, and what to do."""
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"its owner asks for consent at {at}: give it on the model's page, and set HF_TOKEN to your token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{at} has no model of this name that you may read: correct it, or set HF_TOKEN for a private one"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model of this name at {at} has no revision {revision!r}: name a branch, tag or commit that it has"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{at} cannot be reached or refuses"
        of = "" if revision is None else f" of revision {revision}"
        return (
            f"what is needed{of} is not in the cache of hub models, {constants.HF_HUB_CACHE}, while {why}: correct the "
            f"name, or fill the cache where there is a connection ({_first_line(error.__cause__ or error)})"
        )
    return f"it cannot be fetched from {at}: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _bars_for(on_progress: Show) -> Any:
    """A class of bars that draw nothing and report the bytes of all files together."""
    from huggingface_hub.utils import tqdm

    found: list[Any] = []  # the bars of bytes; the library has one for received and one for written bytes

    class Reported(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            if kwargs.get("unit") == "B":
                found.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if found:
                done, total = (max(getattr(bar, name) or 0 for bar in found) for name in ("n", "total"))
                on_progress("megabytes fetched", int(done) // _MB, int(max(done, total)) // _MB)

    return Reported
