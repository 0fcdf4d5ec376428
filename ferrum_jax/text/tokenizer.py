"""A checkpoint's tokenizer: text to token ids by its own rules, and back.

Read from `tokenizer.json`; `tokenizer_config.json` and `special_tokens_map.json` beside it name the special
tokens, may add others, and may override whether BOS and EOS are added. Ids beyond the vocabulary (padded embeddings)
have no text.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.io.files.json_files import read_optional_json
from ferrum_jax.text.long_texts import BYTES, LONG, LongTexts, require_whole

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED = "added_tokens_decoder"  # tokens by id, with what is said of each
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONTEXT_TOKENS = 8  # tokens before a text on which its first characters can depend


class Tokenizer:
    """Encodes and decodes; holds what a chat template and a text stream need to know.

    special_tokens: role ("bos_token", ...) to its text. byte_level: a token is a run of bytes whatever stands before
    it. byte_ids: tokens of one byte each, with that byte; a run of them is decoded as a whole (byte fallback).
    digest: of everything that decides which ids a text gets.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, config: dict[str, Any] | None = None, content: bytes | None = None
    ) -> None:
        """content: of the file tokenizer.json; None if there is none."""
        config = config or {}
        library.no_truncation()
        library.no_padding()
        added = _add_tokens(library, config)
        decoder = json.loads(library.to_str()).get("decoder") or {}
        self._library = library
        self._long = LongTexts(library)
        self._pieces: dict[int, bytes] = {}
        self.special_tokens = special_tokens(config)
        self.byte_level = decoder.get("type") == "ByteLevel"
        self.byte_ids = _byte_ids(library) if _uses(decoder, "ByteFallback") else {}
        self.special_ids = frozenset(i for i, token in library.get_added_tokens_decoder().items() if token.special)
        self._bos = _Edge(self._id_of("bos_token"), self._wish(config, "bos_token"), self._adds(0))
        self._eos = _Edge(self._id_of("eos_token"), self._wish(config, "eos_token"), self._adds(-1))
        wishes = self._wish(config, "bos_token"), self._wish(config, "eos_token")
        rules = library.to_str().encode() if content is None else content
        self.digest = digest_of(rules, self.special_tokens, wishes, *added)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None where there is none."""
        return None if self._bos.id < 0 else self._bos.id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text; None where there is none."""
        return None if self._eos.id < 0 else self._eos.id

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder (or of a tokenizer.json); None where there is none.

        Raises ValueError naming the file that cannot be read.
        """
        path = Path(folder)
        path = path if path.is_file() else path / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # the library raises nothing narrower
            if not (isinstance(error, Exception) or _is_panic(error)):
                raise
            raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
        return cls(library, read_tokenizer_config(path.parent), path.read_bytes())

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def to_json(self) -> str:
        """The content of its tokenizer.json, as the library writes it."""
        return self._library.to_str()

    def special_texts(self) -> dict[str, int]:
        """The text of each special token, and its id."""
        return {str(self._library.id_to_token(i)): i for i in sorted(self.special_ids)}

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, as the tokenizer spells it; None beyond the vocabulary."""
        return self._library.id_to_token(token_id)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        at_most: int | None = None,
        last: int | None = None,
    ) -> list[int]:
        """Token ids of text. With special tokens BOS and EOS are added by the tokenizer's rule, BOS never twice.

        A rendered chat is encoded without special tokens, because its template writes them. max_tokens: the end of the
        text is cut off so that at most this many tokens remain, special ones included. A long text need not be encoded
        whole: at_most raises TextTooLong for a text of more tokens, and `last` gives the ids of an end that has more
        than this many.
        """
        with _taken(text):  # what reads long texts asks the library by itself
            if len(text) > LONG and last is not None:
                text = self._long.end(text, last)
            elif len(text) > LONG and max_tokens is not None:
                text = self._long.start(text, max_tokens)
            elif len(text) > LONG and at_most is not None:
                return self._finished(self._long.encoding(text, at_most), add_special_tokens)
        ids = self._encoded(text, add_special_tokens=add_special_tokens).ids
        ids = self._with_edges(ids) if add_special_tokens else ids
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        return self._cut(text, len(ids) - max_tokens, add_special_tokens)

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], int | None]:
        """Token ids of two texts as the tokenizer's own rule puts them together, and where those of the second begin.

        None where the model does not tell them apart. max_tokens: the ends of the texts are cut off, of the longer one
        first, so that at most this many tokens remain, special ones included.
        """
        for text in (first, second):
            require_whole(text, "in one text of a pair")
        whole = self._encoded(first, second)
        if max_tokens is not None and len(whole.ids) > max_tokens:
            one, other = (self._encoded(text, add_special_tokens=False) for text in (first, second))
            short, long = sorted((one, other), key=lambda encoding: len(encoding.ids))
            room = max(max_tokens - (len(whole.ids) - len(one.ids) - len(other.ids)), 0)
            short.truncate(min(len(short.ids), room // 2))
            long.truncate(room - len(short.ids))
            whole = self._library.post_process(one, other)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else None

    def _encoded(self, text: str, second: str | None = None, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """A text or a pair as the library encodes it. Raises ValueError as `_taken` does."""
        with _taken(text):
            return self._library.encode(text, second, add_special_tokens=add_special_tokens)

    def _cut(self, text: str, num_tokens: int, add_special_tokens: bool) -> list[int]:
        """The ids of text without its last tokens; special tokens stay."""
        encoding = self._encoded(text, add_special_tokens=False)
        if num_tokens > len(encoding.ids):
            raise ValueError(
                f"cannot cut {num_tokens} tokens off a text that has {len(encoding.ids)} beside special ones"
            )
        encoding.truncate(len(encoding.ids) - num_tokens)
        return self._finished(encoding, add_special_tokens)

    def _finished(self, encoding: tokenizers.Encoding, add_special_tokens: bool) -> list[int]:
        """The ids of an encoding without special tokens, which are added where they are wanted."""
        if not add_special_tokens:
            return encoding.ids
        return self._with_edges(self._library.post_process(encoding).ids)

    def _with_edges(self, ids: list[int]) -> list[int]:
        ids = self._with_bos(ids)
        return [*ids, self._eos.id] if self._eos.is_missing_from(ids[-1:]) else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> str:
        """The text that `ids` add to the text of `after`, the tokens before them (a prompt, or nothing).

        Bytes that are not UTF-8 become U+FFFD. Equals what a TextStream gives for the same ids.
        """
        context = self.context(after, skip_special_tokens)
        known = self.visible(ids, skip_special_tokens)
        return self.raw_text([*context, *known])[len(self.raw_text(context)) :]

    def context(self, after: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The last tokens of `after` on which the following text depends; none for a byte-level tokenizer."""
        if self.byte_level:
            return []
        return self.visible(after[-4 * _CONTEXT_TOKENS :], skip_special_tokens)[-_CONTEXT_TOKENS:]

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids that are text: not those beyond the vocabulary, nor special tokens if they are to be skipped."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return [i for i in ids if i not in skipped and self._library.id_to_token(i) is not None]

    def raw_text(self, ids: Sequence[int]) -> str:
        """The library's text of ids, special tokens included."""
        return self._library.decode(ids, skip_special_tokens=False)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; none beyond the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._library.id_to_token(token_id) or ""
            known = all(character in BYTES for character in token)
            piece = bytes(BYTES[c] for c in token) if known else token.encode()
            self._pieces[token_id] = piece
        return piece

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._library.token_to_id(text)

    def _wish(self, config: dict[str, Any], role: str) -> bool | None:
        """Whether the configuration wants BOS (or EOS) added; None where it does not say."""
        wish = config.get(f"add_{role}")
        if wish is not None and not isinstance(wish, bool):
            raise ValueError(f"tokenizer_config.json has add_{role} {reprlib.repr(wish)}; it must be true or false")
        if wish and self._id_of(role) is None:
            named = self.special_tokens.get(role)
            raise ValueError(f"tokenizer_config.json has add_{role} true and {role} {named!r}, which is not a token")
        return wish

    def _adds(self, place: int) -> int | None:
        """The id that the tokenizer itself puts first (0) or last (-1); None if it adds nothing there."""
        plain, ids = (self._encoded("a", add_special_tokens=adds).ids for adds in (False, True))
        return ids[place] if ids[place : place + 1 or None] != plain[place : place + 1 or None] else None

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._bos
        if bos.added_by_library and ids[:1] == [bos.id] and (bos.unwanted or ids[1:2] == [bos.id]):
            return ids[1:]
        return [bos.id, *ids] if bos.is_missing_from(ids[:1]) else ids


@contextlib.contextmanager
def _taken(text: str) -> Iterator[None]:
    """Raises ValueError for what is no text, and where the library gives up.

    Its patterns come with a checkpoint. One that has too many ways to match ends after ten million steps, in an error
    that is no Exception, so that it would end the thread that serves everybody.
    """
    try:
        yield
    except TypeError as error:
        raise ValueError(f"the prompt is not text in Unicode: {text[:80]!r}; remove lone surrogates") from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise ValueError(
            f"the tokenizer gives up on {text[:80]!r}, {str(error)[:200]}; its tokenizer.json has a pattern that does "
            "not end on this text: take that of the model's publisher"
        ) from None


class _Edge:
    """Whether BOS (or EOS) is added: `wish` of tokenizer_config.json decides, or else the library's post-processor."""

    def __init__(self, token_id: int | None, wish: bool | None, added: int | None) -> None:
        self.id = -1 if token_id is None else token_id
        self.added_by_library = token_id is not None and added == token_id
        self.unwanted = wish is False
        self._wanted = wish is True

    def is_missing_from(self, edge: list[int]) -> bool:
        return self._wanted and edge != [self.id]


def require_tokenizer(tokenizer: Tokenizer | None, source: str | Path) -> Tokenizer:
    """The tokenizer, or ValueError that says what to do without one. source: the checkpoint's folder."""
    if tokenizer is None:
        raise ValueError(
            f"{source} has no tokenizer.json: prompts must be lists of token ids, or give tokenizer= a folder with one"
        )
    return tokenizer


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json and tokenizer_config.json as one object; the latter wins.

    A folder whose tokenizer_config.json lists no added tokens has them in added_tokens.json, by text.
    """
    named = [read_optional_json(folder / name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    config = {key: value for values in named for key, value in values.items() if value is not None}
    if _ADDED not in config:
        special = {*special_tokens(config).values()}
        config[_ADDED] = {
            str(token_id): {"content": text, "special": text in special, "normalized": text not in special}
            for text, token_id in read_optional_json(folder / "added_tokens.json").items()
        }
    return config


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Role ("bos_token", ...) to the text of the special token that a tokenizer's configuration names for it."""
    return {role: _text_of(role, config[role]) for role in _SPECIAL if config.get(role)}


def _add_tokens(library: tokenizers.Tokenizer, config: dict[str, Any]) -> list[str]:
    """Adds tokens that only the configuration has, or describes otherwise, as transformers does; returns their names.

    Raises ValueError for an entry that is no token, or whose id the library does not give it.
    """
    special, added = {*special_tokens(config).values()}, []
    known = {token.content: repr(token) for token in library.get_added_tokens_decoder().values()}
    for token_id, said in sorted(_tokens_by_id(config.get(_ADDED) or {}).items()):
        content = said["content"]
        token = tokenizers.AddedToken(**{**said, "special": said.get("special", False) or content in special})
        if known.get(content) == repr(token):
            continue
        before = library.token_to_id(content)
        library.add_tokens([token])
        if before is None and library.token_to_id(content) != token_id:
            raise ValueError(
                f"tokenizer_config.json has {content!r} at {token_id} of {_ADDED}, and behind the tokens of "
                f"tokenizer.json it would be {library.token_to_id(content)}; add it there, or correct its id"
            )
        added.append(f"{library.token_to_id(content)} {token!r}")
    return added


def _tokens_by_id(named: object) -> dict[int, dict[str, Any]]:
    """The arguments of each AddedToken. Raises ValueError for an entry that has others."""
    found = {}
    for key, said in named.items() if isinstance(named, dict) else [("", named)]:
        told = {name: said[name] for name in ("content", *_FLAGS) if name in said} if isinstance(said, dict) else {}
        is_token = key.isdecimal() and isinstance(told.get("content"), str) and told["content"]
        if not is_token or not all(isinstance(told.get(flag, False), bool) for flag in _FLAGS):
            raise ValueError(
                f"tokenizer_config.json has {reprlib.repr(said)} in {_ADDED}; it must be an object that has, for each "
                f"id, an object with content, a text, and {', '.join(_FLAGS)}, each true or false"
            )
        found[int(key)] = told
    return found


def _is_panic(error: BaseException) -> bool:
    """Whether the library broke off; its error has a class that nothing exports, and is no Exception."""
    return type(error).__name__ == "PanicException"


def _text_of(role: str, token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(
            f"tokenizer_config.json has {role} {reprlib.repr(token)}; it must be text, or an object with its content"
        )
    return text


def _uses(decoder: dict[str, Any], kind: str) -> bool:
    return decoder.get("type") == kind or any(_uses(part, kind) for part in decoder.get("decoders", ()))


def _byte_ids(library: tokenizers.Tokenizer) -> dict[int, int]:
    ids = {library.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in ids.items() if token_id is not None}
