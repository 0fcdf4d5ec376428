"""Sources of one kind of media take its data: URLs, paths and bytes, and name it where they take none."""

import base64
import dataclasses
from typing import ClassVar

import pytest

from ferrum_jax.inputs.media.kinds import IMAGE, SOUND, VIDEO, MediaKind
from ferrum_jax.inputs.media.media_sources import MediaSources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(MediaSources):
    kind: ClassVar[MediaKind] = IMAGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sounds(MediaSources):
    kind: ClassVar[MediaKind] = SOUND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Videos(MediaSources):
    kind: ClassVar[MediaKind] = VIDEO


KINDS = (Images, Sounds, Videos)
EACH = pytest.mark.parametrize("of", KINDS, ids=lambda of: of.kind.noun)
FILE = bytes(range(200))


def url(of: type[MediaSources], content: bytes = FILE) -> str:
    return f"data:{of.kind.type}/x-any;codecs=h264;base64,{base64.b64encode(content).decode()}"


@EACH
def test_bytes_paths_and_urls_of_the_kind_are_taken(of, tmp_path):
    path = tmp_path / "a b.bin"
    path.write_bytes(FILE)
    sources = of(root=str(tmp_path))
    for given in (FILE, memoryview(FILE), path, url(of), f"file://{tmp_path}/a%20b.bin"):
        assert sources.content(given) == FILE


@EACH
def test_a_data_url_of_another_kind_is_refused(of):
    for other in KINDS:
        if other is not of:
            said = f"the {of.kind.noun}'s URL is .* write data:{of.kind.type}/{of.kind.example};base64,"
            with pytest.raises(ValueError, match=said):
                of().content(url(other))


@EACH
def test_errors_name_the_kind(of, tmp_path):
    noun = of.kind.noun
    with pytest.raises(ValueError, match=f"the {noun} has 200 bytes; at most 199 are taken: {of.kind.smaller}"):
        of(max_bytes=199).content(FILE)
    with pytest.raises(ValueError, match=f"the {noun} .* cannot be read: No such file"):
        of().content(tmp_path / "none")
    with pytest.raises(ValueError, match=f"the {noun}'s URL is of example.com; none is allowed"):
        of().content("https://example.com/a")
    with pytest.raises(ValueError, match=f"the {noun}'s host 127.0.0.1 has a private address; {noun}s are fetched"):
        of(hosts=("*",)).content("http://127.0.0.1/a")


@EACH
def test_what_has_no_bytes_is_none(of):
    assert [of().content(given) for given in (None, 3, [FILE], {"url": "data:,"})] == [None] * 4
