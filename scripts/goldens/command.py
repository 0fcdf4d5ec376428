"""The command line of what makes goldens."""

import argparse
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path


def run(
    description: str | None, names: Iterable[str], out: str, make: Callable[[str, Path], None], *, keeps: bool = False
) -> None:
    """Makes the folders that the command line names, all of them by default; other names are refused.

    keeps: what is written by hand, such as config.json, stays; else a folder is made from nothing.
    """
    known = list(names)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=known, help=f"of {known}")
    parser.add_argument("--out", type=Path, default=Path(out))
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"nothing is called {sorted(unknown)}; there are {known}")
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.utils.logging.disable_progress_bar()
    for name in arguments.names:
        folder = arguments.out / name
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        make(name, folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {size / 1000:.0f} KB")
