"""Long texts are encoded in pieces that change no token, and only as much of them as the answer needs."""

import functools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from ferrum_jax.text import long_texts
from ferrum_jax.text import tokenizer as tokenizer_module
from ferrum_jax.text.cuts import Cuts
from ferrum_jax.text.long_texts import FewestTokens, LongTexts, TextTooLong
from ferrum_jax.text.tokenizer import Tokenizer
from tests.support import GOLDENS, ROOT, raising
from tests.text.samples import CORPUS, SPECIAL, byte_level, sentencepiece

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    *("the", "end", "of", "a line", "def f(x):", "x=1", "don't"),
    *("It'S", "naïve", "héllo", "cafe\u0301", "你好", "мир", "🙂"),
]
WORDS += [
    *("12345", "\n", "\n\n", "  ", "\t", " ", "<s>", "<tool>", "é b", "...", "'", "word", "A", "\u3000", "ends", "s"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=60).flatmap(
    lambda words: st.lists(st.sampled_from(["", " ", " ", " "]), min_size=len(words), max_size=len(words)).map(
        lambda gaps: "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    )
)


def trained(*steps, normalizer=None) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(step), "isolated") for step in steps]
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if normalizer is not None:
        library.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [*CORPUS, *WORDS, "  \n\n" * 9],
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    library.decoder = decoders.ByteLevel()
    return library


def gemma() -> tokenizers.Tokenizer:
    """No word is split off; spaces are marked, and no entry has a letter before a mark."""
    library = tokenizers.Tokenizer.from_str(sentencepiece().to_str())
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return library


def unigram() -> tokenizers.Tokenizer:
    """As XLM-R: words apart, each with its mark."""
    pieces = [
        ("<unk>", 0.0),
        *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz▁"),
        ("▁the", -1.0),
        ("end", -2.0),
    ]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return library


def bert() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(GOLDENS / "encoders" / "bert" / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return library


def with_stripping_token() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    library.add_special_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True)])
    return library


KINDS = {
    "gpt2": byte_level,
    "llama2": sentencepiece,
    "llama3": lambda: trained(LLAMA3),
    "qwen2": lambda: trained(QWEN2, normalizer=normalizers.NFC()),
    "o200k": lambda: trained(O200K),
    "deepseek": lambda: trained(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK),
    "demo": lambda: tokenizers.Tokenizer.from_file(str(ROOT / "checkpoints" / "demo" / "tokenizer.json")),
    "gemma": gemma,
    "unigram": unigram,
    "bert": bert,
    "strips": with_stripping_token,
}
made = functools.cache(lambda kind: KINDS[kind]())


cuts_of = functools.cache(lambda kind: Cuts.of(made(kind)))
fewest_of = functools.cache(lambda kind: FewestTokens(made(kind)))


def ids_of(library, *texts: str) -> list[int]:
    return [token for text in texts for token in library.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(text=TEXTS)
def test_pieces_have_the_tokens_of_the_whole_text(kind, text):
    library, cuts = made(kind), cuts_of(kind)
    whole = ids_of(library, text)
    assert cuts is not None
    for size in (0, 20):
        pieces = list(cuts.pieces(text, size))
        assert ids_of(library, *(text[piece] for piece in pieces)) == whole
        backwards = list(cuts.pieces_backwards(text, size))[::-1]
        assert ids_of(library, *(text[piece] for piece in backwards)) == whole
        assert size or [pieces] == [backwards], "every cut is found from both sides"
    assert fewest_of(kind).of(text) <= len(whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda library: setattr(library, "normalizer", normalizers.Strip()),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.UnicodeScripts()),
        lambda library: library.add_tokens(["the end"]),
        lambda library: library.add_tokens([AddedToken("the", rstrip=True)]),
        lambda library: setattr(library, "model", models.BPE({"a": 0, " ": 1, "a ": 2}, [("a", " ")], dropout=0.1)),
    ],
)
def test_a_tokenizer_with_a_rule_that_is_not_known_is_not_cut(change):
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    change(library)
    assert Cuts.of(library) is None


def test_words_that_stay_joined_are_cut_only_where_no_entry_joins_them():
    def joined(*merges):
        vocab = {token: place for place, token in enumerate(("a", "Ġ", "b", *map("".join, merges)))}
        library = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return Cuts.of(library)

    assert joined(("Ġ", "b")) is not None and joined(("a", "Ġ")) is None


class Counting:
    """A library that counts the characters that it encodes."""

    def __init__(self, library) -> None:
        self.library, self.characters = library, 0

    def __getattr__(self, name):
        return getattr(self.library, name)

    def encode(self, text, second=None, **how):
        self.characters += len(text) + len(second or "")
        return self.library.encode(text, second, **how)


def counted(kind) -> tuple[Tokenizer, Counting]:
    own = Tokenizer(made(kind))
    counting = own._library = Counting(own._library)
    own._long = LongTexts(counting)  # type: ignore[arg-type]
    return own, counting


@pytest.fixture
def short_pieces(monkeypatch):
    for module in (long_texts, tokenizer_module):
        monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(long_texts, "MOST_WHOLE", 2000)


LONG_TEXT = " ".join(random.Random(1).choices(["the", "end", "of", "a", "line", "12", "x=1"], k=20_000))


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "bert", "unigram"])
def test_of_a_text_that_does_not_fit_no_more_is_encoded_than_shows_it(short_pieces, kind):
    own, counting = counted(kind)
    whole = Tokenizer(made(kind)).encode(LONG_TEXT)
    with pytest.raises(TextTooLong, match=r"at least|more than"):
        own.encode(LONG_TEXT, at_most=500)
    assert counting.characters < 5000
    counting.characters = 0
    found = own.encode(LONG_TEXT, last=16)
    assert found[-16:] == whole[-16:] and 16 < len(found) < 400 and counting.characters < 1000
    counting.characters = 0
    assert own.encode(LONG_TEXT, max_tokens=16) == Tokenizer(made(kind)).encode(LONG_TEXT[:300], max_tokens=16)
    assert counting.characters < 1500
    assert own.encode(LONG_TEXT, at_most=len(whole)) == whole, "what fits is taken, with its special tokens"


def test_what_its_bytes_say_is_refused_unread(short_pieces):
    own, counting = counted("gpt2")
    with pytest.raises(TextTooLong, match=r"at least [\d,]+ tokens, as its 3,000,000 characters say"):
        own.encode("the" * 1_000_000, at_most=500)
    assert counting.characters == 0


@pytest.mark.parametrize("how", [{"at_most": 500}, {"last": 16}, {"max_tokens": 16}])
@pytest.mark.parametrize("kind", ["bert", "unigram"])
def test_what_has_no_cut_and_no_least_length_is_taken_up_to_a_size(short_pieces, kind, how):
    own, counting = counted(kind)
    with pytest.raises(TextTooLong, match="2,001 characters without a space between two words, and 2,000"):
        own.encode("x" * 2001, **how)
    assert counting.characters == 0
    assert own.encode("x" * 1999, last=16)


def test_pairs_are_taken_up_to_a_size():
    own, counting = counted("bert")
    with pytest.raises(TextTooLong, match="in one text of a pair"):
        own.encode_pair("x", "x " * (long_texts.MOST_WHOLE // 2 + 1), max_tokens=16)
    assert counting.characters == 0


def test_a_panic_of_the_library_is_an_error_of_the_text(monkeypatch):
    own, counting = counted("gpt2")
    PanicException = type("PanicException", (BaseException,), {})
    monkeypatch.setattr(counting, "encode", raising(PanicException("index out of bounds")))
    with pytest.raises(ValueError, match="gives up on 'x', index out of bounds"):
        own.encode("x")
    with pytest.raises(ValueError, match="gives up on 'x'"):
        own.encode_pair("x", "y")
