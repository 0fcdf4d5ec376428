"""The bytes of an http(s) URL, from hosts that are allowed, at addresses that the whole world can reach.

A URL of a stranger must not reach what only this machine can. So a name is resolved once, every address that it has
must be public, and the connection goes to an address that was checked: a name that resolves to something else a moment
later changes nothing. Each redirect is checked as the first URL was. One deadline holds for all of it; when it passes
the connection is shut, so that a server that sends a byte now and then gains nothing.
"""

import contextlib
import dataclasses
import errno
import http.client
import io
import ipaddress
import os
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

from ferrum_jax.inputs.media.kinds import MediaKind, MediaRefused

_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_URL = 8192
_MAX_BESIDE_BODY = 1 << 20  # bytes of headers and of chunks' sizes, beside as many as the body's
_PORTS = {"http": 80, "https": 443}
# Networks whose addresses hold one of IPv4, and where in them it begins (bits from the end).
_HOLDS_IPV4 = (
    (ipaddress.ip_network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.ip_network("64:ff9b:1::/48"), 0),
    (ipaddress.ip_network("::/96"), 0),  # IPv4-compatible
)
# IPv4 ranges that Python takes for public: protocol assignments (RFC 6890), the relays of 6to4 (RFC 7526).
_NOT_PUBLIC = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("192.88.99.0/24"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchLimits:
    """kind: of what is fetched. hosts: that may be asked, "*" for all. max_bytes: of the answer. timeout_s: of all
    redirects together."""

    kind: ClassVar[MediaKind]
    hosts: tuple[str, ...] = ()
    max_bytes: int = 32 << 20
    timeout_s: float = 10.0
    max_redirects: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HttpTarget:
    """Where one request goes, checked against the hosts. target: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def name(self) -> str:
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def fetched(url: str, limits: FetchLimits) -> bytes:
    """The body of the answer. Raises ValueError saying why there is none; what the server says is not repeated."""
    deadline, noun = time.monotonic() + limits.timeout_s, limits.kind.noun
    for _ in range(limits.max_redirects + 1):
        place = _target_of(url, limits)
        try:
            body, elsewhere = _asked(place, deadline, limits)
        except MediaRefused:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:  # http.client reads numbers of the answer
            if time.monotonic() >= deadline:
                raise ValueError(f"the {noun} of {place.name} took more than {limits.timeout_s:g} s") from error
            why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            raise ValueError(f"the {noun} of {place.name} cannot be fetched: {why}") from error
        if elsewhere is None:
            return body
        url = _joined(url, elsewhere, place, noun)
    raise ValueError(f"the {noun}'s URL leads to more than {limits.max_redirects} others; give the last one")


def _joined(url: str, elsewhere: str, place: _HttpTarget, noun: str) -> str:
    try:
        return urllib.parse.urljoin(url, elsewhere)
    except ValueError as error:
        raise MediaRefused(f"the {noun} of {place.name} is elsewhere, at a URL that is malformed: {error}") from error


def _target_of(url: str, limits: FetchLimits) -> _HttpTarget:
    """Raises ValueError for a URL that is malformed, or whose host is not allowed."""
    wrong, hosts, noun = None, limits.hosts, limits.kind.noun
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = (parsed.hostname or "").rstrip("."), parsed.port
    except ValueError as error:
        raise ValueError(f"the {noun}'s URL is malformed: {error}") from error
    if len(url) > _LONGEST_URL or not url.isascii() or any(c.isspace() or ord(c) < 33 or c == "\\" for c in url):
        wrong = f"it must be at most {_LONGEST_URL} printable ASCII characters; write others as %XX"
    elif parsed.scheme not in _PORTS:
        wrong = f"its scheme is {parsed.scheme!r}; http and https are fetched"
    elif not host or "@" in parsed.netloc:
        wrong = "it must name a host, and no user or password"
    if wrong is not None:
        raise ValueError(f"the {noun}'s URL is malformed: {wrong}")
    place = _HttpTarget(
        scheme=parsed.scheme,
        host=host,
        port=port or _PORTS[parsed.scheme],
        target=urllib.parse.urlunsplit(("", "", parsed.path or "/", parsed.query, "")),
    )
    if "*" not in hosts and place.name not in {name.lower().rstrip(".") for name in hosts}:
        said = f"allowed are {', '.join(hosts)}" if hosts else "none is allowed: give a data: URL"
        raise ValueError(f"the {noun}'s URL is of {place.name}; {said}, or name the host in allow_image_hosts")
    return place


def _asked(place: _HttpTarget, deadline: float, limits: FetchLimits) -> tuple[bytes, str | None]:
    """The body, or where the server sends us instead."""
    address, noun = _address_of(place, deadline, limits.kind.noun), limits.kind.noun
    headers = {
        "Accept": f"{limits.kind.type}/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
        "User-Agent": "ferrum-jax",
    }
    most = 2 * limits.max_bytes + _MAX_BESIDE_BODY
    with _connected(place, address, deadline, most) as connection:
        connection.request("GET", place.target, headers=headers)
        answer = connection.getresponse()
        if answer.status in _REDIRECTS:
            elsewhere = answer.getheader("Location")
            if not elsewhere:
                raise MediaRefused(f"the {noun} of {place.name} is elsewhere, and the server does not say where")
            return b"", elsewhere
        if answer.status != 200:
            raise MediaRefused(f"the {noun} of {place.name} cannot be fetched: the server answers {answer.status}")
        if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise MediaRefused(f"the {noun} of {place.name} is sent compressed, though it was not asked for so")
        body = answer.read(limits.max_bytes + 1)
        if len(body) > limits.max_bytes or (answer.length or 0) > 0:
            short = len(body) <= limits.max_bytes
            what = "ends before its time" if short else f"has more than {limits.max_bytes:,} bytes"
            raise MediaRefused(f"the {noun} of {place.name} {what}")
    if time.monotonic() >= deadline:  # shut from this side: what came may be no more than a part
        raise MediaRefused(f"the {noun} of {place.name} took more than {limits.timeout_s:g} s")
    return body, None


def _address_of(place: _HttpTarget, deadline: float, noun: str) -> str:
    """A public address of the host. Raises ValueError if any that it has is not, OSError if it has none in time."""
    found: queue.SimpleQueue[list | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError(f"no such name: {error}"))

    threading.Thread(target=resolve, daemon=True, name="media-host").start()  # the resolver knows no timeout
    try:
        answers = found.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("its name is not resolved") from None
    if isinstance(answers, OSError):
        raise answers
    addresses = [answer[4][0] for answer in answers]
    if not all(is_public(address) for address in addresses):
        raise MediaRefused(
            f"the {noun}'s host {place.host} has a private address; {noun}s are fetched from public ones only"
        )
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address of IPv4 or IPv6 is one that the whole world can reach, as is one of IPv4 that it holds."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        held = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        held += [ipaddress.IPv4Address(int(found) >> bits & 0xFFFFFFFF) for net, bits in _HOLDS_IPV4 if found in net]
        inner = [each for each in held if each is not None]
        if inner:
            return all(is_public(str(each)) for each in inner)
        if found.is_site_local:
            return False
    if any(found in network for network in _NOT_PUBLIC):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


@contextlib.contextmanager
def _connected(place: _HttpTarget, address: str, deadline: float, most: int) -> Iterator[http.client.HTTPConnection]:
    """A connection to the address that was checked, which is shut at the deadline whatever is going on.

    most: bytes that are read from it.
    """
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise TimeoutError("no time is left")
    connection = http.client.HTTPConnection(place.host, place.port, timeout=rest)  # which the Host header follows
    plain = socket.create_connection((address, place.port), timeout=rest)
    # of the same connection, and still there when TLS has taken over the first one
    shutter = socket.socket(fileno=os.dup(plain.fileno()))
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, (shutter,))
    timer.daemon = True
    timer.start()
    try:
        if place.scheme == "https":
            plain = ssl.create_default_context().wrap_socket(plain, server_hostname=place.host)
            connection.default_port = _PORTS["https"]  # else the Host header would name the port
        connection.sock = _BoundedSocket(plain, most)  # type: ignore[assignment]
        yield connection
    finally:
        timer.cancel()
        plain.close()
        shutter.close()


class _BoundedSocket:
    """A socket that reads at most so many bytes of an answer, whatever its headers and chunks claim."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection, self._most = connection, most

    def makefile(self, mode: Any) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReader(self._connection.makefile(mode, buffering=0), self._most))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _BoundedReader(io.RawIOBase):
    def __init__(self, inner: Any, most: int) -> None:
        self._inner, self._left = inner, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        count = self._inner.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, "the answer is too long")
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
