"""An image comes from where it may and from nowhere else: no other file, no private address, no endless answer."""

import base64
import contextlib
import http.server
import io
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest
from PIL import Image

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.inputs.media import fetching
from ferrum_jax.inputs.media.fetching import is_public
from scripts.goldens.pictures import picture
from tests.rows import rows_beside
from tests.vision.hostile import saved

ROWS = rows_beside(__file__)

PIXELS = picture(5, 7, 0)
FILE = saved(Image.fromarray(PIXELS), "PNG")
DATA = "data:image/png;base64," + base64.b64encode(FILE).decode()
NONE = ImageSources()
LENGTH = len(FILE)


def test_in_python_an_image_is_what_one_has(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    for given in (Image.fromarray(PIXELS), PIXELS, FILE, bytearray(FILE), memoryview(FILE), path, DATA):
        np.testing.assert_array_equal(NONE.read(given), PIXELS)
    np.testing.assert_array_equal(NONE.read(Image.open(io.BytesIO(FILE))), PIXELS)


@pytest.mark.parametrize("given", [None, 3, [PIXELS], {"image": PIXELS}])
def test_what_is_no_image_is_refused_with_its_type(given):
    with pytest.raises(ValueError, match=f"the image is a {type(given).__name__}; it must be a Pillow image"):
        NONE.read(given)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening one would wait for a writer
    for name, said in (("none.png", "No such file"), ("", "Is a directory"), ("pipe", "it is not a file")):
        with pytest.raises(ValueError, match=f"the image .* cannot be read: {said}"):
            NONE.read(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        NONE.read(pathlib.Path("a\0b"))


@pytest.mark.parametrize("url", ["/etc/passwd", "a.png", "ftp://example.com/a.png", "", "javascript:1", " data:,"])
def test_a_url_is_never_a_path(url):
    with pytest.raises(ValueError, match="it must begin with data:, http:, https: or file:"):
        NONE.read(url)


@pytest.mark.parametrize(
    "url", [DATA.upper().partition(",")[0] + "," + DATA.partition(",")[2], DATA.replace("+", "%2B"), DATA + "\r\n"]
)
def test_a_data_url_may_be_written_in_several_ways(url):
    np.testing.assert_array_equal(NONE.read(url), PIXELS)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *ROWS["a data url that is none is refused and not repeated"],
        ("data:image/png," + "a" * 9, "write data:image/png;base64,"),
        ("data:image/png;base64," + "A" * 9, "is not base64"),
        (DATA.replace(",", ", "), "is not base64 .*no spaces"),
        (DATA[:60] + " " + DATA[60:], "is not base64"),
        ("data:" + "x" * 1000 + ",", "write data:image/png;base64,"),
    ],
)
def test_a_data_url_that_is_none_is_refused_and_not_repeated(url, said):
    with pytest.raises(ValueError, match=said) as raised:
        NONE.read(url)
    assert len(str(raised.value)) < 400


def test_a_data_url_is_measured_before_it_is_decoded():
    body = "A" * (4 << 20)
    with pytest.raises(ValueError, match="the image has 3,145,726 bytes; at most 1,000 are taken"):
        ImageSources(max_bytes=1000).read("data:image/png;base64," + body)


def test_bytes_and_files_are_measured_before_they_are_read(tmp_path):
    (tmp_path / "a.png").write_bytes(FILE)
    sources = ImageSources(max_bytes=len(FILE) - 1, root=str(tmp_path))
    for given in (FILE, tmp_path / "a.png", f"file://{tmp_path}/a.png", DATA):
        with pytest.raises(
            ValueError, match=f"the image has {len(FILE):,} bytes; at most|cannot be read: the image has"
        ):
            sources.read(given)


@pytest.fixture
def folder(tmp_path):
    """A root with a picture in a folder, and beside it a secret to which links lead."""
    root = tmp_path / "root"
    (root / "in a").mkdir(parents=True)
    (root / "in a" / "b.png").write_bytes(FILE)
    (tmp_path / "secret.png").write_bytes(FILE)
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "b.png").write_bytes(FILE)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "near.png").symlink_to(root / "in a" / "b.png")
    return root


def test_a_file_below_the_root_is_read(folder, tmp_path):
    for root in (folder, f"{folder}/", tmp_path / "root" / ".." / "root"):
        sources = ImageSources(root=str(root))
        for url in (
            f"file://{folder}/in%20a/b.png",
            f"FILE://localhost{folder}/in a/b.png",
            f"file:{folder}/in a/b.png",
        ):
            np.testing.assert_array_equal(sources.read(url), PIXELS)


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret.png", "/in a/../../secret.png", "/%2e%2e/secret.png", "/in%20a/%2E%2E/../secret.png", "2/b.png"),
        *("/link.png", "/up/secret.png", "/near.png", "/in a", "", "/", "//in a/b.png", "/in a/./b.png", "/none.png"),
        *("/in a/b.png?x", "/in a/b.png#x", "/in a/b.png%00.txt", "/in a%2fb.png/../../../secret.png", "/%252e%252e/x"),
    ],
)
def test_no_url_of_a_file_leads_out_of_the_root(folder, path):
    with pytest.raises(ValueError, match="the image"):
        ImageSources(root=str(folder)).read(f"file://{folder}{path}")


def test_a_file_of_another_machine_or_without_a_root_is_refused(folder):
    with pytest.raises(ValueError, match="write file:// and the whole path"):
        ImageSources(root=str(folder)).read(f"file://example.com{folder}/in a/b.png")
    with pytest.raises(ValueError, match="files are read below image_root, which is not given"):
        NONE.read(f"file://{folder}/in a/b.png")


@pytest.mark.parametrize(("field", "said"), ROWS["settings that mean nothing are refused"])
def test_settings_that_mean_nothing_are_refused(field, said):
    with pytest.raises(ValueError, match=said):
        ImageSources(**field)


def test_a_config_says_what_is_allowed(tmp_path):
    allowed = ImageSources.allowed("a.test, b.test:8080", str(tmp_path))
    assert allowed == ImageSources(hosts=("a.test", "b.test:8080"), root=str(tmp_path))
    assert ImageSources.allowed(EngineConfig().allow_image_hosts, EngineConfig().image_root) == NONE
    with pytest.raises(ValueError, match="image_root is 'nowhere', which is no folder"):
        ImageSources.allowed("", "nowhere")


PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2002:808:808::1", "64:ff9b::808:808")
PRIVATE = (
    *("192.0.0.8", "192.0.0.9", "192.88.99.1", "::ffff:192.0.0.170"),
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0"),
    *(
        *("fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1"),
        *("::ffff:a9fe:a9fe", "::127.0.0.1", "2001:db8::1"),
    ),
    *("2002:7f00:1::", "2002:a00:1::1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "64:ff9b:1::a00:1", "localhost", "1"),
    "2001:0:4136:e378:8000:63bf:80ff:fffe",  # Teredo of 127.0.0.1
)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_that_the_world_can_reach_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_only_this_machine_or_network_can_reach_is_not(address):
    assert not is_public(address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path; seen: the Host header and path of each request."""

    seen: list[tuple[str, str]]

    def do_GET(self):
        self.seen.append((self.headers["Host"], self.path))
        name = self.path.strip("/").partition("?")[0]
        with contextlib.suppress(OSError):
            getattr(self, f"do_{name}", self.do_picture)()

    def do_picture(self, length=LENGTH, body=FILE, **headers):
        self.send_response(200)
        for key, value in {"Content-Length": length, **headers}.items():
            if value is not None:
                self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def do_short(self):
        self.do_picture(body=FILE[:-9])

    def do_long(self):
        self.do_picture(length=None, body=FILE + bytes(1 << 20))

    def do_said_long(self):
        self.do_picture(length=1 << 40)

    def do_zipped(self):
        self.do_picture(**{"Content-Encoding": "gzip"})

    def do_missing(self):
        self.send_error(404, "the secret of this server")

    def do_slow(self):
        self.send_response(200)
        self.end_headers()
        for byte in FILE:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def do_slow_head(self):
        self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while True:
            self.wfile.write(b"A: b\r\n")
            time.sleep(0.05)

    def do_go(self):
        self.send_response(302)
        self.send_header("Location", self.path.partition("?")[2])
        self.end_headers()

    def do_nowhere(self):
        self.send_response(302)
        self.end_headers()

    def log_message(self, format, *args):
        pass

    def do_raw(self, content: bytes):
        self.wfile.write(content)

    def do_endless(self, first: bytes, rest: bytes):
        """For as long as anybody reads."""
        self.wfile.write(first)
        while True:
            self.wfile.write(rest)

    def do_chunk_of_minus_one(self):
        self.do_endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", bytes(1 << 16))

    def do_trailers(self):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        self.do_endless(head, b"A: b\r\n" * 1000)

    def do_continues(self):
        self.do_endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    def do_chunk_of_minus_five(self):
        self.do_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n")


NAMES = ROWS["names"]


@contextlib.contextmanager
def serving(seen, context=None):
    """The port of a server, until the test ends. context: of TLS."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"seen": seen}))
    found.daemon_threads = True
    if context is not None:
        found.socket, found.handle_error = context.wrap_socket(found.socket, server_side=True), lambda *_: None
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found.server_port
    found.shutdown()
    found.server_close()


@pytest.fixture
def server(monkeypatch):
    """Its port, what it saw and which names were resolved. It is on this machine and stands for one of the world.

    127.0.0.1 is public to these tests, and nothing else that is private.
    """
    seen, resolved = [], []

    def resolve(host, port, *_, **__):
        resolved.append(host)
        if host not in NAMES and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (NAMES.get(host, host), port))]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve)
    real = is_public
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1" or real(address))
    connect = socket.create_connection
    monkeypatch.setattr(
        fetching.socket, "create_connection", lambda to, **given: connect(("127.0.0.1", to[1]), **given)
    )
    with serving(seen) as port:
        yield port, seen, resolved


def sources(port, **given):
    return ImageSources(**{"hosts": (f"pictures.test:{port}",), **given})


def test_a_picture_of_an_allowed_host_is_fetched_by_its_name(server):
    port, seen, resolved = server
    np.testing.assert_array_equal(sources(port).read(f"http://Pictures.Test.:{port}/a/b.png?c=d#e"), PIXELS)
    assert seen == [(f"pictures.test:{port}", "/a/b.png?c=d")] and resolved == ["pictures.test", "127.0.0.1"]


# A chunk of -1 bytes is all that comes, to Python's own reader.
TOO_LONG = r"the image of pictures.test:\d+ cannot be fetched: the answer is too long"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        *ROWS["an answer that is no picture is refused with the reason"],
        *((path, TOO_LONG) for path in ("chunk_of_minus_one", "trailers", "continues")),
    ],
)
def test_an_answer_that_is_no_picture_is_refused_with_the_reason(server, path, said):
    port, _, _ = server
    with pytest.raises(ValueError, match=said):
        sources(port, max_bytes=10_000).read(f"http://pictures.test:{port}/{path}")


@pytest.mark.parametrize("path", ["slow", "slow_head"])
def test_a_server_that_sends_a_byte_now_and_then_gains_no_time(server, path):
    port, _, _ = server
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"took more than 0.3 s"):
        sources(port, timeout_s=0.3).read(f"http://pictures.test:{port}/{path}")
    assert time.monotonic() - start < 5


def test_a_redirect_is_followed_where_the_first_url_could_have_gone(server):
    port, seen, _ = server
    np.testing.assert_array_equal(sources(port).read(f"http://pictures.test:{port}/go?/b.png"), PIXELS)
    assert [path for _, path in seen] == ["/go?/b.png", "/b.png"]


@pytest.mark.parametrize(("target", "said"), ROWS["a redirect to where the first url could not go is refused"])
def test_a_redirect_to_where_the_first_url_could_not_go_is_refused(server, target, said):
    port, _, _ = server
    with pytest.raises(ValueError, match=said):
        sources(port).read(f"http://pictures.test:{port}/go?{target}")


def test_a_redirect_to_a_private_address_is_refused_though_every_host_is_allowed(server):
    port, seen, _ = server
    with pytest.raises(ValueError, match=r"the image's host private.test has a private address"):
        sources(port, hosts=("*",)).read(f"http://pictures.test:{port}/go?http://private.test:{port}/a.png")
    assert len(seen) == 1


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1"),
        *("127.1", "[::1]", "[::ffff:127.0.0.1]", "0", "[::]"),
    ],
)
def test_no_spelling_of_this_machine_is_connected_to(host, monkeypatch):
    monkeypatch.setattr(fetching.socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    with pytest.raises(ValueError, match=r"has a private address|cannot be fetched"):
        ImageSources(hosts=("*",)).read(f"http://{host}:80/a.png")


def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch):
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *a, **k: both)
    monkeypatch.setattr(fetching.socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    with pytest.raises(ValueError, match="has a private address"):
        ImageSources(hosts=("a.test",)).read("http://a.test/a.png")


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A name that means this machine when it is asked again changes nothing, because it is asked once."""
    answers = iter(["8.8.8.8", "127.0.0.1"])
    resolve = lambda host, port, *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]  # noqa: E731
    connected = []

    def connect(address, **_):
        connected.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetching.socket, "create_connection", connect)
    with pytest.raises(ValueError, match=r"the image of a.test cannot be fetched: Connection refused"):
        ImageSources(hosts=("a.test",)).read("http://a.test/a.png")
    assert connected == [("8.8.8.8", 80)]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *ROWS["a url of another host or of none is refused before a name is resolved"],
        ("http://pictures.test/" + "a" * 9000, "malformed: it must be at most 8192"),
    ],
)
def test_a_url_of_another_host_or_of_none_is_refused_before_a_name_is_resolved(url, said, monkeypatch):
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *a, **k: pytest.fail("resolved"))
    with pytest.raises(ValueError, match=said):
        ImageSources(hosts=("pictures.test",)).read(url)


def test_without_allowed_hosts_none_is_asked(monkeypatch):
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *a, **k: pytest.fail("resolved"))
    with pytest.raises(ValueError, match="none is allowed: give a data: URL, or name the host in allow_image_hosts"):
        NONE.read("https://example.com/a.png")


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *a, **k: asked.wait(5))
    with pytest.raises(ValueError, match=r"the image of a.test took more than 0.1 s"):
        ImageSources(hosts=("a.test",), timeout_s=0.1).read("http://a.test/a.png")
    asked.set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_asks_for_the_certificate_of_the_name_though_it_connects_to_an_address(server, tmp_path, monkeypatch):
    """TLS of the same server: a certificate of its name is taken, and that of another is not."""
    _, seen, _ = server
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "9", "-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetching.ssl, "create_default_context", lambda: trusting)
    with serving(seen, context) as port:
        np.testing.assert_array_equal(sources(port).read(f"https://pictures.test:{port}/a.png"), PIXELS)
        assert seen == [(f"pictures.test:{port}", "/a.png")]
        with pytest.raises(ValueError, match=r"the image of other.test:\d+ cannot be fetched"):
            sources(port, hosts=("*",)).read(f"https://other.test:{port}/a.png")
