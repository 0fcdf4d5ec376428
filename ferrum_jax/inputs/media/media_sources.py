"""Where media that a user gives may come from: `ImageSources` and its like, one for each kind of media.

A medium is bytes, a `pathlib.Path`, or a URL. A string is a URL and never a path, since it may come over HTTP or in a
job's rows. A `data:` URL is always taken; `http(s):` of the hosts that are allowed, at addresses that the whole world
can reach; `file:` below one folder.
"""

import binascii
import dataclasses
import os
import re
import stat
import urllib.parse
from pathlib import Path
from typing import Any, Self

from ferrum_jax.inputs.media.fetching import FetchLimits, fetched

_SCHEME = re.compile(r"(data|https?|file):", re.IGNORECASE)
_MEDIA_TYPE = re.compile(r"data:(\w+)/[\w.+-]+(?:;[\w.+=-]+)*;base64", re.IGNORECASE)
_LONGEST_HEAD = 200  # characters of a data: URL before its comma
_SHOWN = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSources(FetchLimits):
    """Where media of a kind may come from, and how large their files may be.

    hosts: names whose http and https URLs are fetched, as `example.com` or `example.com:8080`; "*" is every host.
    Private addresses are never connected to. root: the folder whose files `file:` URLs name, or None. Symbolic
    links in it are not followed.
    max_bytes: of a file. max_prompt_bytes: of all files of a prompt together. timeout_s: of one fetch, redirects
    included.
    """

    root: str | None = None
    max_prompt_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9.-]+(:\d{1,5})?", host):
                raise ValueError(f"image host {host!r} is no name such as example.com or example.com:8080, nor '*'")
        if self.root is not None and not os.path.isabs(self.root):
            raise ValueError(f"image root {self.root!r} is not an absolute path; give the whole path of the folder")
        for name in (
            field.name
            for field in dataclasses.fields(self)
            if field.name.startswith("max_") and field.name != "max_redirects"
        ):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number, 1 or more")

    @classmethod
    def allowed(cls, hosts: str, folder: str | None) -> Self:
        """Sources by `allow_image_hosts` and `image_root`. Raises ValueError for a host or a root that cannot be."""
        if folder is not None and not folder.strip():
            raise ValueError("image_root is empty; name the folder that holds images, or leave it out")
        root = None if folder is None else os.path.abspath(os.path.expanduser(folder))
        if root is not None and not os.path.isdir(root):
            raise ValueError(f"image_root is {folder!r}, which is no folder; name the one that holds images")
        return cls(hosts=tuple(name.strip() for name in hosts.split(",") if name.strip()), root=root)

    def content(self, given: Any) -> bytes | None:
        """The bytes given, or of the file that a path or URL names; None for any other value.

        Raises ValueError saying why they are not taken.
        """
        if isinstance(given, str):
            return self._of_url(given)
        if isinstance(given, os.PathLike):
            return self._file_of_user(Path(given))
        if isinstance(given, bytes | bytearray | memoryview):
            self._check_bytes(len(given))
            return bytes(given)
        return None

    def _of_url(self, url: str) -> bytes:
        scheme = _SCHEME.match(url)
        kind = scheme[1].lower() if scheme else ""
        if kind == "data":
            return self._data(url)
        if kind == "file":
            return self._file_below_root(url)
        if kind:
            return fetched(url, self)
        raise ValueError(
            f"the {self.kind.noun}'s URL is {_shown(url)}; it must begin with data:, http:, https: or "
            "file:; a path is given as a pathlib.Path"
        )

    def _check_bytes(self, count: int) -> None:
        if count > self.max_bytes:
            raise ValueError(
                f"the {self.kind.noun} has {count:,} bytes; at most {self.max_bytes:,} are taken: {self.kind.smaller}"
            )

    def _data(self, url: str) -> bytes:
        comma = url.find(",", 0, _LONGEST_HEAD)
        head = _MEDIA_TYPE.fullmatch(url[:comma]) if comma >= 0 else None
        if head is None or head[1].lower() != self.kind.type:
            raise ValueError(
                f"the {self.kind.noun}'s URL is {_shown(url)}; write "
                f"data:{self.kind.type}/{self.kind.example};base64,.. with the file in base64"
            )
        self._check_bytes((len(url) - comma - 1) * 3 // 4 - 2)
        body = url[comma + 1 :]
        body = urllib.parse.unquote(body) if "%" in body else body
        try:
            # line breaks are what MIME puts in; a space may once have been a plus, so it is not dropped
            content = binascii.a2b_base64(body.translate({10: None, 13: None}).encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ValueError(
                f"the {self.kind.noun}'s data: URL is not base64 ({error}); it needs the alphabet with + and /, its "
                "padding, and no spaces"
            ) from error
        return content

    def _file_of_user(self, path: Path) -> bytes:
        try:
            return self._bytes_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (OSError, ValueError) as error:
            raise ValueError(f"the {self.kind.noun} {_shown(str(path))} cannot be read: {_reason(error)}") from error

    def _file_below_root(self, url: str) -> bytes:
        """The bytes of the file that a URL names, walked to from the root, so that no link and no `..` leads out."""
        if self.root is None:
            raise ValueError(
                f"the {self.kind.noun}'s URL is {_shown(url)}; files are read below image_root, which is not "
                "given: give a data: URL"
            )
        parsed = urllib.parse.urlsplit(url)
        path = urllib.parse.unquote(parsed.path)
        root = os.path.normpath(self.root)
        inside = path.removeprefix(root.rstrip("/") + "/")
        parts = inside.split("/")
        if parsed.netloc not in ("", "localhost") or parsed.query or parsed.fragment or "\0" in path:
            raise ValueError(f"the {self.kind.noun}'s URL is {_shown(url)}; write file:// and the whole path of a file")
        if inside == path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the {self.kind.noun}'s URL is {_shown(url)}, which is not below the image root {root}")
        try:
            return self._bytes_of(_opened_below(root, parts))
        except (OSError, ValueError) as error:
            raise ValueError(f"the {self.kind.noun} {_shown(url)} cannot be read: {_reason(error)}") from error

    def _bytes_of(self, descriptor: int) -> bytes:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is not a file")
            self._check_bytes(found.st_size)
            content = file.read(self.max_bytes + 1)
            self._check_bytes(len(content))
            return content


def _opened_below(root: str, parts: list[str]) -> int:
    """A descriptor of the file; the root may be a link, and nothing below it is followed if it is one."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    for part in parts:
        try:
            following = os.open(part, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = following
    return descriptor


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "..")
