"""The images that a user may give, and where they may come from.

An image is a Pillow image, a uint8 array, bytes, a `pathlib.Path`, or a URL. A string is a URL and never a path, since
it may come over HTTP or in a job's rows. A `data:` URL is always taken; `http(s):` of the hosts that are allowed, at
addresses that the whole world can reach; `file:` below one folder.
"""

from __future__ import annotations

import binascii
import dataclasses
import os
import re
import stat
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.vision.decoding import (
    MAX_PIXELS,
    Look,
    check_array,
    decoded_image,
    do_not_look,
    header_size,
    pixels_of,
    pixels_of_array,
)
from ferrum_jax.vision.fetching import FetchLimits, fetched

_SCHEME = re.compile(r"(data|https?|file):", re.IGNORECASE)
_MEDIA_TYPE = re.compile(r"data:image/[\w.+-]+(?:;[\w.+=-]+)*;base64", re.IGNORECASE)
_LONGEST_HEAD = 200  # characters of a data: URL before its comma
_SHOWN = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSources:
    """Where images may come from, and how large they may be.

    hosts: names whose http and https URLs are fetched, as `example.com` or `example.com:8080`; "*" is every host.
    Private addresses are never connected to. root: the folder whose files `file:` URLs name; None is none. Symbolic
    links in it are not followed.
    max_bytes: of a file. max_pixels: of an image, before it is decoded. max_prompt_bytes, max_prompt_pixels: of all
    files of a prompt together. timeout_s: of one fetch, redirects included.
    """

    hosts: tuple[str, ...] = ()
    root: str | None = None
    max_bytes: int = 32 << 20
    max_pixels: int = MAX_PIXELS
    max_prompt_bytes: int = 128 << 20
    max_prompt_pixels: int = 4 * MAX_PIXELS
    timeout_s: float = 10.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9.-]+(:\d{1,5})?", host):
                raise ValueError(f"image host {host!r} is no name such as example.com or example.com:8080, nor '*'")
        if self.root is not None and not os.path.isabs(self.root):
            raise ValueError(f"image root {self.root!r} is not an absolute path; give the whole path of the folder")
        for name in ("max_bytes", "max_pixels", "max_prompt_bytes", "max_prompt_pixels"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number, 1 or more")

    @classmethod
    def of_config(cls, config: EngineConfig) -> ImageSources:
        """The sources that a config allows. Raises ValueError for a host or a root that cannot be one."""
        hosts = tuple(name.strip() for name in config.allow_image_hosts.split(",") if name.strip())
        if config.image_root is not None and not config.image_root.strip():
            raise ValueError("image_root is empty; name the folder that holds images, or leave it out")
        root = None if config.image_root is None else os.path.abspath(os.path.expanduser(config.image_root))
        if root is not None and not os.path.isdir(root):
            raise ValueError(f"image_root is {config.image_root!r}, which is no folder; name the one that holds images")
        return cls(hosts=hosts, root=root)

    def read(self, given: Any) -> np.ndarray:
        """The pixels, uint8 [H, W, 3], of what a Python user gives. Raises ValueError saying what is wrong with it."""
        return self.pixels(self.found(given))

    def read_url(self, url: str) -> np.ndarray:
        """The pixels, uint8 [H, W, 3], of a URL and of nothing else. Raises ValueError saying why it is not taken."""
        return self.pixels(self._found_url(url))

    def found(self, given: Any) -> Any:
        """The image that a Python user gives, with a file's bytes for its path or URL. Raises ValueError for others."""
        if isinstance(given, str):
            return self._found_url(given)
        if isinstance(given, os.PathLike):
            return self._file_of_user(Path(given))
        if isinstance(given, bytes | bytearray | memoryview):
            self._check_bytes(len(given))
            return bytes(given)
        if isinstance(given, np.ndarray) or (hasattr(given, "getbands") and hasattr(given, "convert")):
            return given  # known as Pillow's without importing Pillow to ask
        raise ValueError(
            f"the image is a {type(given).__name__}; it must be a Pillow image, a uint8 array [height, width, 3], "
            "bytes, a pathlib.Path or a URL"
        )

    def size(self, found: Any) -> tuple[int, int]:
        """Width and height of what was found, from its header. Raises ValueError as `pixels`."""
        if isinstance(found, bytes):
            return header_size(found, max_pixels=self.max_pixels)
        if isinstance(found, np.ndarray):
            check_array(found, self.max_pixels)
            return found.shape[1], found.shape[0]
        return found.width, found.height

    def pixels(self, found: Any, look: Look = do_not_look) -> np.ndarray:
        """The pixels, uint8 [H, W, 3], of what was found. Raises ValueError saying what is wrong with it."""
        if isinstance(found, bytes):
            return decoded_image(found, max_pixels=self.max_pixels, look=look)
        if isinstance(found, np.ndarray):
            return pixels_of_array(found, max_pixels=self.max_pixels)
        return pixels_of(found, max_pixels=self.max_pixels)

    def _found_url(self, url: str) -> bytes:
        if not isinstance(url, str):
            raise ValueError(f"the image's URL is {url!r}; it must be a string")
        scheme = _SCHEME.match(url)
        kind = scheme[1].lower() if scheme else ""
        if kind == "data":
            return self._data(url)
        if kind == "file":
            return self._file_below_root(url)
        if kind:
            limits = FetchLimits(
                hosts=self.hosts,
                max_bytes=self.max_bytes,
                timeout_s=self.timeout_s,
                max_redirects=self.max_redirects,
            )
            return fetched(url, limits)
        raise ValueError(
            f"the image's URL is {_shown(url)}; it must begin with data:, http:, https: or "
            "file:; a path is given as a pathlib.Path"
        )

    def _check_bytes(self, count: int) -> None:
        if count > self.max_bytes:
            raise ValueError(f"the image has {count:,} bytes; at most {self.max_bytes:,} are taken: make it smaller")

    def _data(self, url: str) -> bytes:
        comma = url.find(",", 0, _LONGEST_HEAD)
        if comma < 0 or not _MEDIA_TYPE.fullmatch(url[:comma]):
            raise ValueError(
                f"the image's URL is {_shown(url)}; write data:image/png;base64,.. with the file in base64"
            )
        self._check_bytes((len(url) - comma - 1) * 3 // 4 - 2)
        body = url[comma + 1 :]
        body = urllib.parse.unquote(body) if "%" in body else body
        try:
            # line breaks are what MIME puts in; a space may once have been a plus, so it is not dropped
            content = binascii.a2b_base64(body.translate({10: None, 13: None}).encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ValueError(
                f"the image's data: URL is not base64 ({error}); it needs the alphabet with + and /, its padding, and "
                "no spaces"
            ) from error
        return content

    def _file_of_user(self, path: Path) -> bytes:
        try:
            return self._bytes_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (OSError, ValueError) as error:
            raise ValueError(f"the image {_shown(str(path))} cannot be read: {_reason(error)}") from error

    def _file_below_root(self, url: str) -> bytes:
        """The bytes of the file that a URL names, walked to from the root, so that no link and no `..` leads out."""
        if self.root is None:
            raise ValueError(
                f"the image's URL is {_shown(url)}; files are read below image_root, which is not "
                "given: give a data: URL"
            )
        parsed = urllib.parse.urlsplit(url)
        path = urllib.parse.unquote(parsed.path)
        root = os.path.normpath(self.root)
        inside = path.removeprefix(root.rstrip("/") + "/")
        parts = inside.split("/")
        if parsed.netloc not in ("", "localhost") or parsed.query or parsed.fragment or "\0" in path:
            raise ValueError(f"the image's URL is {_shown(url)}; write file:// and the whole path of a file")
        if inside == path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the image's URL is {_shown(url)}, which is not below the image root {root}")
        try:
            return self._bytes_of(_opened_below(root, parts))
        except (OSError, ValueError) as error:
            raise ValueError(f"the image {_shown(url)} cannot be read: {_reason(error)}") from error

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
