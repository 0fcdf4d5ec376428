"""A folder of sounds as the rows of a job: one for each file below it, named by its path there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

ENDINGS = tuple(".wav .flac .mp3 .mpga .ogg .opus .m4a .mp4 .webm .mka .mkv .aac .aiff .aif".split())  # noqa: SIM905


def rows_of_folder(folder: str | os.PathLike[str]) -> bytes:
    """JSON lines, in the order of the paths. No link is followed, and other files are left out.

    Raises ValueError for a folder without a sound, and OSError for one that cannot be read.
    """
    found = sorted(_sounds_below(Path(folder)))
    if not found:
        raise ValueError(f"{os.fspath(folder)} has no file of sound; names must end in {', '.join(ENDINGS)}")
    return b"".join(json.dumps({"custom_id": path, "file": path}).encode() + b"\n" for path in found)


def _sounds_below(folder: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(place, name)
            if name.lower().endswith(ENDINGS) and not path.is_symlink():
                yield path.relative_to(folder).as_posix()
