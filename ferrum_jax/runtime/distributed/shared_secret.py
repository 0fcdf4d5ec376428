"""The secret by which processes of one engine know one another.

It is given in a file or as a text. Where process 0 has a loopback address, all processes are on one host, and what is
not given is a file that only their user can read, made when it is first needed.
"""

import contextlib
import ipaddress
import os
import pathlib
import secrets
import socket
import stat

OWN_FILE = "~/.cache/ferrum_jax/processes.secret"
_LEAST, _MOST = 16, 4096  # bytes
_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def given_secret(file: str | os.PathLike[str] | None, text: str | None) -> bytes | None:
    """The secret of the file or, without one, of the text; None where neither is given.

    Raises ValueError for one that is short, and for a file that everybody on the host can read or write.
    """
    if file is not None:
        return _read(pathlib.Path(file).expanduser(), stat.S_IRWXO)
    return None if text is None else _checked(text.encode(), "the secret of the environment")


def secret_for(host: str, given: bytes | None) -> bytes:
    """The secret of processes whose process 0 is at `host`. Raises ValueError where it must be given and is not."""
    if given is not None:
        return given
    if not is_loopback(host):
        raise ValueError(
            f"the processes meet at {host}, where others can come too, and no secret is given: {_MAKE}, copy it to "
            "every host, and name it with coordinator_secret_file (--coordinator-secret-file)"
        )
    path = pathlib.Path(OWN_FILE).expanduser()
    try:
        if not path.exists():
            _make(path)
        return _read(path, stat.S_IRWXG | stat.S_IRWXO)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be made or read ({error}); {_MAKE}, and give --coordinator-secret-file"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether the name or address is one that only this host can reach."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def require_own_name(host: str) -> None:
    """Raises ValueError where process 0 knows its host's name as a loopback address, which no other host reaches."""
    literal = host.strip("[]").replace(".", "").isdecimal() or ":" in host
    if not literal and host != "localhost" and is_loopback(host):
        raise ValueError(
            f"the coordinator's host is {host}, which on that host itself is a loopback address; give its IP address, "
            "or 127.0.0.1 where all processes are on it"
        )


def _make(path: pathlib.Path) -> None:
    """Writes the file whole, or leaves the one that another process has made meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _read(path: pathlib.Path, forbidden: int) -> bytes:
    """The file's secret. forbidden: bits of its mode that may not be set."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_mode & forbidden:
            raise ValueError(f"{path} holds a secret that others can read or write; chmod 600 {path}")
        return _checked(file.read(_MOST + 1), str(path))


def _checked(secret: bytes, source: str) -> bytes:
    secret = secret.strip()
    if not _LEAST <= len(secret) <= _MOST:
        raise ValueError(f"{source} has {len(secret)} bytes; a secret has {_LEAST} to {_MOST}: {_MAKE}")
    return secret
