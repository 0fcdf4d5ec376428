"""A matcher's state is a function of its row's tokens; masks, copies and forced tokens agree with it."""

import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.text.structured.grammars import _LIMITS, Grammars
from ferrum_jax.text.structured.matcher import STUCK, Matcher, all_forced, fill_all
from ferrum_jax.text.structured.vocabulary import Vocabulary
from ferrum_jax.text.tokenizer import Tokenizer
from tests.histories import seeded
from tests.rows import rows_beside
from tests.structured.vocabularies import END, allowed, demo_tokenizer, demo_vocabulary, drawn

ROWS = rows_beside(__file__)

SCHEMA = ROWS["schema"]
ASKED = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex="(ab|c){1,9}"),
    StructuredOutputsParams(choice=["yes", "nö", "yesterday"]),
    StructuredOutputsParams(grammar='root ::= "a" [0-9]+ | "b"'),
    StructuredOutputsParams(grammar='start: "a" /[0-9]+/ | %json {"enum": ["b"]}'),
]
GRAMMARS = Grammars(demo_vocabulary())


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.kind)
def test_a_matcher_that_is_fed_the_same_tokens_allows_the_same(asked):
    grammar, rng = GRAMMARS.get(asked), random.Random(seeded(3))
    matcher, tokens = grammar.matcher(), []
    while not matcher.must_end and len(tokens) < 40:
        assert allowed(grammar.matcher(tokens)) == allowed(matcher)
        assert matcher.forced() == grammar.matcher(tokens).forced()
        token = rng.choice([token for token in allowed(matcher) if token != END])
        assert matcher.advance(token)
        tokens.append(token)


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(0, 10**6), st.data())
def test_tokens_that_a_copy_takes_leave_no_trace(number, seed, data):
    grammar, rng = GRAMMARS.get(ASKED[number]), random.Random(seed)
    tokens = drawn(grammar.matcher(), rng, most=30) or []
    kept = tokens[: data.draw(st.integers(0, len(tokens)))]
    matcher = grammar.matcher(kept)
    ahead = matcher.copy()
    ahead.replay([*tokens[len(kept) :], END, 0])
    assert matcher.num_allowed(tokens[len(kept) :]) == len(tokens) - len(kept), "it would take what the copy took"
    assert matcher.may_end == grammar.matcher(kept).may_end
    assert allowed(matcher) == allowed(grammar.matcher(kept))


def test_the_vocabulary_beyond_the_tokenizer_is_never_allowed():
    vocabulary = demo_vocabulary()
    masks = np.full((2, vocabulary.words), -1, np.int32)
    matchers = [GRAMMARS.get(asked).matcher() for asked in ASKED[:2]]
    fill_all(vocabulary, matchers, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert bits[:, : vocabulary.size].any() and not bits[:, vocabulary.size :].any()
    assert [np.flatnonzero(row).tolist() for row in bits] == [allowed(matcher) for matcher in matchers]


def test_a_token_that_is_not_allowed_is_an_error_of_the_row():
    matcher = GRAMMARS.get(ASKED[2]).matcher()
    assert not matcher.advance(demo_vocabulary().size + 3)
    assert matcher.error is not None and "does not allow token" in matcher.error
    assert not matcher.advance(END)


def test_a_state_in_which_nothing_may_come_is_an_error_of_the_row():
    stuck = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    matcher = GRAMMARS.get(StructuredOutputsParams(json=stuck)).matcher()
    assert matcher.replay(demo_tokenizer().encode('{"a":'))
    assert not matcher.fill(demo_vocabulary().blank_masks(1)[0]) and matcher.error == STUCK


def test_forced_tokens_are_those_that_the_tokenizer_writes():
    asked = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    matcher = GRAMMARS.get(asked).matcher()
    forced = matcher.forced()
    assert forced and demo_tokenizer().encode('{"name":"x')[: len(forced)] == forced
    for token in forced:
        assert allowed(matcher) == [token]
        assert matcher.advance(token)
    assert matcher.forced() == [] and len(allowed(matcher)) > 1


def test_a_grammar_begins_after_the_end_of_thinking():
    begins_after = demo_tokenizer().encode("</think>")
    thoughts = demo_tokenizer().encode("hm, {")
    matcher = GRAMMARS.get(ASKED[0]).matcher(thoughts, begins_after=begins_after)
    assert not matcher.has_begun and not matcher.may_end
    assert matcher.replay(begins_after) and matcher.has_begun
    assert allowed(matcher) == allowed(GRAMMARS.get(ASKED[0]).matcher())


def test_equal_wishes_are_compiled_once_and_the_oldest_are_dropped():
    grammars = Grammars(demo_vocabulary(), most=2)
    for number in (1, 2, 1, 3, 1, 2):
        assert grammars.get(StructuredOutputsParams(regex=f"a{{{number}}}")).fault() is None
    assert (grammars.num_compiled, grammars.num_hits) == (4, 2)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"regex": "("}, "structured_outputs.regex does not compile: .*unclosed group"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ],
)
def test_what_does_not_compile_is_named(asked, match):
    fault = GRAMMARS.get(StructuredOutputsParams(**asked)).fault()
    assert fault is not None
    with pytest.raises(ValueError, match=match):
        raise fault


def test_limits_are_counts_that_end_a_compile_or_a_row(monkeypatch):
    asked = StructuredOutputsParams(regex="(.*a){30}(.|\\n){200}")
    monkeypatch.setitem(_LIMITS, "initial_lexer_fuel", 100)
    assert "too big (limit for this grammar: 100)" in str(Grammars(demo_vocabulary()).get(asked).fault())
    monkeypatch.setitem(_LIMITS, "initial_lexer_fuel", 1_000_000)
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 40)
    grammar = Grammars(demo_vocabulary()).get(asked)
    errors = []
    for _ in range(2):
        matcher, rng = grammar.matcher() if grammar.fault() is None else None, random.Random(0)
        while matcher and matcher.fill(demo_vocabulary().blank_masks(1)[0]):
            assert matcher.advance(rng.choice([token for token in allowed(matcher) if token != END]))
        errors.append(str(matcher.error if matcher else grammar.fault()))
    assert errors[0] == errors[1] and "state" in errors[0].lower()


@pytest.mark.parametrize(("values", "match"), ROWS["wishes that are none are refused"])
def test_wishes_that_are_none_are_refused(values, match):
    with pytest.raises(ValueError, match=match):
        StructuredOutputsParams.from_dict(values)


def test_choices_are_their_texts_and_may_be_many():
    texts = [
        *("a\x00b", "a.b", "(x)", "[y]{2}", "^$", "a|b", "\\d", "é😀"),
        *("-~&#", "<a>", "\n\t ", '"q"', "yes", "yesterday"),
    ]
    ready = GRAMMARS.get(StructuredOutputsParams(choice=[*texts, *(f"{number:x}" for number in range(9000))]))

    def takes(text: str) -> bool:
        matcher = ready.matcher()
        return matcher.replay(demo_tokenizer().encode(text)) and matcher.may_end

    assert all(map(takes, [*texts, "0", "2327"])) and not any(map(takes, ["aXb", "x", "yy", "2328", "yest", ""]))


def test_a_schema_whose_texts_meet_a_limit_is_refused():
    many = {f"p{number}": {"type": "null"} for number in range(600)}
    asked = StructuredOutputsParams(json={"type": "object", "properties": many, "additionalProperties": False})
    fault = str(GRAMMARS.get(asked).fault())
    assert "compiles, and its texts soon meet a limit" in fault
    assert "items; max is 2000" in fault and "fewer properties" in fault


def test_a_pattern_whose_texts_meet_a_limit_at_once_is_refused_and_not_its_rows():
    words = {"type": "string", "pattern": "^$|(^(?:\\S+\\s+){0,99}\\S+$)"}
    fault = str(GRAMMARS.get(StructuredOutputsParams(json={**words, "maxLength": 5000})).fault())
    assert "too many expressions constructed" in fault and "a smaller maxLength beside it" in fault
    assert GRAMMARS.get(StructuredOutputsParams(json=words)).fault() is None
    short = {"type": "string", "pattern": "^[a-z ]*$", "maxLength": 5000}
    assert GRAMMARS.get(StructuredOutputsParams(json=short)).fault() is None


def test_structural_tags_hold_where_their_trigger_comes():
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    grammar = GRAMMARS.get(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    encode = demo_tokenizer().encode
    assert grammar.matcher().replay(encode("free text <f>12</f> more"))
    assert not grammar.matcher().replay(encode("free text <f>x</f> more"))
    with pytest.raises(ValueError, match="no trigger begins it"):
        GRAMMARS.get(StructuredOutputsParams(structural_tag=json.dumps(tag | {"triggers": ["<g"]})))


def test_a_model_without_end_tokens_is_refused():
    with pytest.raises(ValueError, match="has no end token"):
        Vocabulary(demo_tokenizer(), vocab_size=5000, end_ids=frozenset())


@pytest.mark.parametrize("forces", [True, False])
def test_forced_tokens_in_a_row_need_no_mask_between_them(monkeypatch, forces):
    grammar = GRAMMARS.get(StructuredOutputsParams(regex="ab " * 300 + "[xy]"))
    tokens = all_forced(grammar.matcher())
    filled, asked = [], []
    fill, forced = Matcher.fill, Matcher.forced
    monkeypatch.setattr(Matcher, "fill", lambda self, mask: filled.append(mask) or fill(self, mask))
    monkeypatch.setattr(Matcher, "forced", lambda self: asked.append(self) or forced(self))
    assert all_forced(grammar.matcher()) == tokens and len(tokens) > 100 and not filled and len(asked) <= 3
    again = grammar.matcher(tokens, forces=forces)
    assert len(filled) == (0 if forces else len(tokens)) and len(asked) <= 6
    assert again.forced() == [] and len(allowed(again)) > 1


@pytest.mark.parametrize(("most", "ends"), [(3, False), (100, True), (0, False)])
def test_a_matcher_takes_no_forced_token_that_does_not_fit(most, ends):
    grammar = GRAMMARS.get(StructuredOutputsParams(regex="ab " * 30))
    every = all_forced(grammar.matcher())
    matcher = grammar.matcher()
    found = all_forced(matcher, most, every[3:4] if ends else ())
    assert found == every[: len(found)] and len(found) <= most and not (ends and every[3] in found)
    assert matcher.forced() == every[len(found) :]


def spaced_tokenizer() -> tokenizers.Tokenizer:
    """As SentencePiece's: a low line in place of spaces; characters that it lacks become bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghiknorstuy<>/"]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>"])
    return made


@pytest.fixture(scope="module", params=["bytes", "spaced"])
def with_added_tokens(request) -> Vocabulary:
    made = tokenizers.Tokenizer.from_str(demo_tokenizer().to_json()) if request.param == "bytes" else spaced_tokenizer()
    for text in ("<think>", "</think>", "<b>", "</b>", "<TABLE>", "[a]"):
        made.add_tokens([tokenizers.AddedToken(text, special=text.isupper(), normalized=False)])
    tokenizer = Tokenizer(made)
    return Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=frozenset({END}))


@pytest.mark.parametrize("asked", ROWS["the text of an added token is spelled by others"], ids=str)
def test_the_text_of_an_added_token_is_spelled_by_others(asked, with_added_tokens):
    grammar, mask = Grammars(with_added_tokens).get(StructuredOutputsParams(**asked)), with_added_tokens.blank_masks(1)
    assert grammar.fault() is None
    for seed in range(6):
        matcher, rng, tokens = grammar.matcher(), random.Random(seed), list[int]()
        while END not in tokens:
            tokens += all_forced(matcher) if seed % 2 else []
            assert matcher.fill(mask[0])
            alone = mask.copy()
            fill_all(with_added_tokens, [matcher], mask)
            assert (mask == alone).all()
            choices = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist()
            tokens.append(END if END in choices else rng.choice(choices))
            assert matcher.advance(tokens[-1])
        again = grammar.matcher()
        assert again.replay(tokens, forces=bool(seed % 2)) and again.may_end
