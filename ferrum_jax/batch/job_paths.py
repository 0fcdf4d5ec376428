"""The paths of a job, checked before anything is read or written."""

import stat

from ferrum_jax.batch.input.files import check_name
from ferrum_jax.batch.report.page import OPENS_WITH
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_store, split
from ferrum_jax.io.paths import NamedPath, is_url, kept_beside, require_apart, require_folder_of


def check_paths(source: str, target: str, page_at: str | None) -> None:
    """Raises ValueError or OSError for an output or a page that cannot be written, or is another of the paths."""
    check_name(target)
    page = [] if page_at is None else [NamedPath(what="report's page", path=page_at, is_written=True)]
    output = NamedPath(what="output", path=target, is_written=True)
    require_apart([NamedPath(what="input", path=source), output, *page, *kept_beside(target, "output")])
    if page_at is not None:
        _check_page(page_at)
    if is_url(target):
        return
    for written in (output, *kept_beside(target, "output")):
        place = system.realpath(written.path)  # of a link, where it leads
        require_folder_of(place, written.what.removeprefix("the "))
        what, fits = ("folder", system.isdir) if written.is_owned else ("file", system.isfile)
        if written.is_owned and system.islink(written.path) and not system.lexists(place):
            raise ValueError(
                f"{written.path}, which is to be {written.what}, is a link to {place}, which is not there; make that "
                "folder, or remove the link"
            )
        if system.lexists(place) and not fits(place):
            raise ValueError(
                f"{written.path}, which is to be {written.what}, is not a {what}; move it away, or name another output"
            )


def _check_page(path: str) -> None:
    """Raises ValueError or OSError where a page cannot be written, or something else than an earlier page stands."""
    local = path.removeprefix("file://")
    if not is_url(local):
        require_folder_of(local, "report's page")
        if system.lexists(local) and not stat.S_ISREG(
            system.lstat(local).st_mode
        ):  # a link would be replaced by a file
            raise ValueError(
                f"{path}, which is to be the report's page, is not a file; move it away, or name another place with "
                "--report"
            )
    folder, name = split(path)
    start = open_store(folder).read(name, 0, len(OPENS_WITH))  # raises now if a URL's driver is not installed
    if start and start != OPENS_WITH:
        raise ValueError(
            f"{path} is a file that is no report of a batch job, and the report's page would replace it; move it away, "
            "or name another place with --report"
        )
