"""The paths of a job, checked before anything is read or written."""

from __future__ import annotations

import os

from ferrum_jax.batch.input.files import check_name
from ferrum_jax.files.store import open_store, split
from ferrum_jax.paths import NamedPath, is_url, kept_beside, require_apart, require_folder_of


def check_paths(source: str, target: str, page_at: str | None) -> None:
    """Raises ValueError or OSError for an output or a page that cannot be written, or is another of the paths."""
    check_name(target)
    page = [] if page_at is None else [NamedPath(what="report's page", path=page_at, is_written=True)]
    output = NamedPath(what="output", path=target, is_written=True)
    require_apart([NamedPath(what="input", path=source), output, *page, *kept_beside(target, "output")])
    if page_at is not None and is_url(page_at):
        open_store(split(page_at)[0])  # raises now if its driver is not installed
    elif page_at is not None:
        require_folder_of(page_at, "report's page")
        if os.path.isdir(page_at):
            raise ValueError(f"{page_at} is not a file; name a file for the report's page")
    if is_url(target):
        return
    require_folder_of(target, "output")
    for written in (output, *kept_beside(target, "output")):
        what, fits = ("folder", os.path.isdir) if written.is_owned else ("file", os.path.isfile)
        if os.path.exists(written.path) and not fits(written.path):
            raise ValueError(
                f"{written.path}, which is to be {written.what}, is not a {what}; move it away, or name another output"
            )
