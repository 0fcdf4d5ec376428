"""Cuts: places where a long text may be encoded in pieces, because the tokens of the pieces are those of the whole.

    ..the last word| and the next..       a cut stands between an ASCII letter and a space before another letter

No token reaches over a cut where the normaliser changes characters one by one, the pre-tokeniser ends its words there
(or the vocabulary has no entry with a letter before a space), and no added token holds the place. All of it is read
from tokenizer.json; a rule that is not known here gives no cuts, and such a text is encoded as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])", re.ASCII)
_HELD = re.compile(r"[A-Za-z] ")
_JOINED = re.compile("[A-Za-z][ \u0120\u2581]")  # a letter before a space, or what stands for one in a vocabulary
_SPACE_MARK = "\u2581"
_PLAIN_NORMALISERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"})
_PLAIN_NORMALISERS |= {"Nmt", "Precompiled"}
_NEUTRAL, _WORDS = (
    frozenset({"Digits", "Punctuation"}),
    frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}),
)

# Alternatives of the published pre-tokenisers' patterns. None matches a letter with a space behind it, none looks back
# over one, and what looks ahead does so behind white space; so a match ends at every cut, and the text behind it is
# matched as if it began there. Alternatives with letters take a word's last letter, whatever else the pattern has.
_LETTERS = frozenset(
    {
        r" ?\p{L}+",
        r"\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"[^\s\p{L}\p{N}_]?[\p{L}_]+",
        r" ?[\p{L}_]+",
    }
    | {
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{one}"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{other}{ending}"
        for one, other in ("*+", "+*")
        for ending in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
    }
)
_OTHERS = frozenset(
    {
        "'s|'t|'re|'ve|'m|'ll|'d",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d|'ll)",
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+", r"\p{N}+"),
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}_]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+", r"\n+", r"(?<=\n) +", r" +(?! )"),
    }
)


class Cuts:
    """drops_space: the space at a cut belongs to neither piece, because the normaliser puts one before each."""

    def __init__(self, *, drops_space: bool) -> None:
        self._skipped = int(drops_space)

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> Cuts | None:
        """The cuts of a tokenizer; None where it has an unknown rule."""
        rules = json.loads(library.to_str())
        normalisers = steps_of(rules.get("normalizer"), "normalizers")
        prepends = any(each["type"] == "Prepend" for each in normalisers)
        if not all(map(_is_plain, normalisers)) or not _leaves_cuts(rules.get("added_tokens") or (), prepends=prepends):
            return None
        marks = any(each.get("pattern") == {"String": " "} for each in normalisers)
        splits = [_splits(each, marks) for each in steps_of(rules.get("pre_tokenizer"), "pretokenizers")]
        if None in splits or not _keeps_to_words(rules["model"], splits_words=any(splits)):
            return None
        return cls(drops_space=prepends)

    def pieces(self, text: str, size: int) -> Iterator[slice]:
        """Pieces of `size` characters and what is left of a word, in order; longer ones where there is no cut."""
        start = 0
        while found := _CUT.search(text, start + size):
            yield slice(start, found.end())
            start = found.end() + self._skipped
        yield slice(start, len(text))

    def pieces_backwards(self, text: str, size: int) -> Iterator[slice]:
        """Like `pieces`, the last one first."""
        end = len(text)
        while found := self._last_before(text, end - max(size, 1)):
            yield slice(found + self._skipped, end)
            end = found
        yield slice(0, end)

    @staticmethod
    def _last_before(text: str, place: int) -> int | None:
        """The last cut at or before `place`."""
        step = 1 << 12
        while place > 0:
            window = _CUT.finditer(text, max(0, place - step), place + 2)
            if ends := [found.end() for found in window]:
                return ends[-1]
            place -= step
        return None


def steps_of(rule: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """A rule's steps, those of sequences too."""
    if rule is None:
        return []
    if rule["type"] != "Sequence":
        return [rule]
    return [each for part in rule[parts] for each in steps_of(part, parts)]


def _is_plain(normaliser: Mapping[str, Any]) -> bool:
    """Whether normalising two parts that meet at a cut gives the same as normalising the whole."""
    if normaliser["type"] == "Replace":
        pattern = normaliser["pattern"]
        return pattern == {"Regex": " {2,}"} or ("String" in pattern and not _HELD.search(pattern["String"]))
    if normaliser["type"] == "Prepend":
        return normaliser["prepend"] == _SPACE_MARK
    return normaliser["type"] in _PLAIN_NORMALISERS


def _leaves_cuts(added: Any, *, prepends: bool) -> bool:
    """Whether no added token holds a cut, or takes the space at one."""
    return not any(
        _HELD.search(token["content"])
        or (token["rstrip"] and token["content"][-1:].isalpha())
        or (token["lstrip"] and token["content"][:1].isalpha())
        or (prepends and (token["normalized"] or token["content"][:1].isalpha()))
        for token in added
    )


def _splits(step: Mapping[str, Any], marks: bool) -> bool | None:
    """Whether a pre-tokeniser's step ends words at cuts; None for an unknown step. marks: no space is left."""
    kind = step["type"]
    if kind == "ByteLevel":
        return bool(step.get("use_regex", True))
    if kind == "Metaspace":
        return True if step.get("split", True) and step["replacement"] == _SPACE_MARK else None
    if kind == "Split":
        return _splits_by(step, marks)
    return True if kind in _WORDS else False if kind in _NEUTRAL else None


def _splits_by(step: Mapping[str, Any], marks: bool) -> bool | None:
    pattern = step["pattern"]
    if pattern == {"String": " "} and marks:
        return False
    if "Regex" not in pattern or (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        return None
    parts = alternatives(pattern["Regex"])
    if not all(part in _LETTERS or part in _OTHERS for part in parts):
        return None
    return any(part in _LETTERS for part in parts)


def alternatives(pattern: str) -> list[str]:
    """The parts of a regular expression between bars that stand in no group and no class."""
    found, start, depth, place = [], 0, 0, 0
    in_class = False
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and depth == 0:
            found.append(pattern[start:place])
            start = place + 1
        place += 1
    return [*found, pattern[start:]]


def _keeps_to_words(model: Mapping[str, Any], *, splits_words: bool) -> bool:
    """Whether a model's tokens reach over no cut."""
    if model["type"] == "BPE" and model.get("dropout"):
        return False
    if splits_words:
        return True
    whole = model["type"] == "BPE" and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    return whole and not any(map(_JOINED.search, model["vocab"])) and not fuses_unknown(model)


def fuses_unknown(model: Mapping[str, Any]) -> bool:
    """Whether one token of a BPE may stand for any number of characters that the vocabulary lacks."""
    falls_back = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return bool(model.get("unk_token") and model.get("fuse_unk") and not falls_back)
