"""A schema's keywords are enforced, or refused with their place; nothing of a schema is passed over."""

import fractions
import json
import random
import types

import jsonschema
import pytest

from ferrum_jax.inputs.params.schema import is_kept
from ferrum_jax.inputs.params.schema_words import ENFORCED
from ferrum_jax.inputs.params.structured_outputs import MOST_BYTES, StructuredOutputsParams
from ferrum_jax.inputs.params.tools import Tool, ToolsAsked
from ferrum_jax.text.structured.compiled_schema import compiled_schema
from ferrum_jax.text.structured.grammars import Grammars
from tests.histories import seeded
from tests.rows import rows_beside
from tests.structured.vocabularies import demo_tokenizer, demo_vocabulary, drawn

ROWS = rows_beside(__file__)

TREE = ROWS["tree"]
# schema, an instance, and one that must not come
CASES = [
    *ROWS["cases"],
    (TREE, {"v": 1, "c": [{"v": 2}]}, {"v": 1, "c": [{"v": 22}]}),
]


# of each keyword that is enforced: a schema, and instances that break it alone
BROKEN = ROWS["broken"]


def grammar(schema, **more):
    return Grammars(demo_vocabulary()).get(StructuredOutputsParams(json=schema, **more))


def accepts(schema, text: str) -> bool:
    matcher = grammar(schema).matcher()
    return matcher.replay(demo_tokenizer().encode(text)) and matcher.may_end


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: None)
def test_a_keyword_lets_its_instances_through_and_no_others(schema, good, bad):
    assert accepts(schema, json.dumps(good, ensure_ascii=False))
    assert not accepts(schema, json.dumps(bad, ensure_ascii=False))


@pytest.mark.parametrize("keyword", sorted(ENFORCED - {"$defs", "definitions"}))
def test_what_breaks_a_keyword_does_not_come(keyword):
    schema, broken = BROKEN[keyword]
    for instance in broken:
        draft = jsonschema.Draft7Validator if keyword == "additionalItems" else jsonschema.Draft202012Validator
        if keyword != "format":  # which jsonschema does not look at
            assert not draft(schema).is_valid(instance)
        assert not accepts(schema, json.dumps(instance, ensure_ascii=False)), instance


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: None)
def test_whatever_is_drawn_at_random_is_valid(schema, good, bad):
    ready, rng = grammar(schema), random.Random(seeded(5))
    texts = [demo_tokenizer().decode(tokens) for _ in range(4) if (tokens := drawn(ready.matcher(), rng)) is not None]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_a_name_written_with_an_escape_does_not_pass_for_another():
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
    assert accepts(schema, '{"a":null,"b":true}')
    assert not accepts(schema, '{"a":null,"\\u0061":true}')
    assert not accepts(schema, '{"a":null,"a":true}')


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        *ROWS["what no grammar enforces is refused with its place"],
        (f'"{"x" * MOST_BYTES}"', f"has 262,146 bytes; at most {MOST_BYTES:,} are allowed"),
        ({"const": {1, 2}}, "cannot be written as JSON"),
        (int, "is the class int, which has no model_json_schema"),
    ],
)
def test_what_no_grammar_enforces_is_refused_with_its_place(schema, match):
    with pytest.raises(ValueError, match=match):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    ("schema", "ignored"), ROWS["words that are no assertions are taken and the unknown give a warning"]
)
def test_words_that_are_no_assertions_are_taken_and_the_unknown_give_a_warning(schema, ignored, caplog):
    asked = StructuredOutputsParams(json=schema)
    said = "the JSON schema has an unknown word, which enforces nothing"
    assert list(asked.warnings) == [f"{said}: #/{place}" for place in ignored]
    grammars = Grammars(demo_vocabulary())
    assert grammars.get(asked).fault() is None and grammars.get(asked).fault() is None
    assert [record.message for record in caplog.records] == [f"structured_outputs: {each}" for each in asked.warnings]


def test_many_unknown_words_are_counted_and_those_of_tools_and_grammars_named():
    many = StructuredOutputsParams(json={f"word{number}": 1 for number in range(20)})
    assert len(many.warnings) == 9 and many.warnings[-1] == "the JSON schema has 12 more unknown words"
    tool = Tool(name="f", parameters='{"type": "object", "links": []}')
    assert "tool f: " in StructuredOutputsParams(tools=ToolsAsked(tools=(tool,))).warnings[0]
    assert "#/links" in StructuredOutputsParams(grammar='start: %json {"links": []}').warnings[0]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), ROWS["what other writers of schemas mean is enforced"], ids=lambda value: None
)
def test_what_other_writers_of_schemas_mean_is_enforced(schema, good, bad):
    assert accepts(schema, json.dumps(good)) and not accepts(schema, json.dumps(bad))


def test_a_schema_that_is_nested_too_deep_is_refused():
    schema: dict = {}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested deeper than 64 at #/items"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(("schema", "match"), ROWS["what does not compile says where"])
def test_what_does_not_compile_says_where(schema, match):
    fault = grammar(schema).fault()
    assert fault is not None
    with pytest.raises(ValueError, match=match):
        raise fault


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" * 400])
def test_numbers_that_are_none_of_json_are_refused(number):
    with pytest.raises(ValueError, match=r"the JSON schema cannot be read: .*; NaN, infinities and numbers beyond"):
        grammar(f'{{"type": "number", "minimum": {number}}}')


def test_a_class_that_gives_its_schema_is_one():
    class Person:
        @classmethod
        def model_json_schema(cls):
            return {"title": "Person", "type": "object", "properties": {"name": {"title": "Name", "type": "string"}}}

    asked = StructuredOutputsParams(json=Person)
    assert asked == StructuredOutputsParams(json=Person.model_json_schema()) and hash(asked)


def test_objects_are_closed_where_that_is_asked_for():
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "properties": {"const": {"properties": {}}}}}
    closed = json.loads(str(StructuredOutputsParams(json=schema, disable_additional_properties=True).json))
    assert closed == schema | {"additionalProperties": False}


def test_the_place_of_a_fault_is_looked_for_in_a_bounded_number_of_bytes(monkeypatch):
    """Each part is compiled with all definitions beside it, so many parts of a long schema would be its square."""
    from ferrum_jax.text.structured import grammars as module

    compiled, matcher = [], module.require_llguidance().LLMatcher

    def grammar(text, **named):
        compiled.append(len(text))
        return matcher.grammar_from_json_schema(text, **named)

    validate = matcher.validate_grammar_with_warnings
    counting = types.SimpleNamespace(grammar_from_json_schema=grammar, validate_grammar_with_warnings=validate)
    limits = module.require_llguidance().LLParserLimits
    library = types.SimpleNamespace(LLMatcher=counting, LLParserLimits=limits)
    monkeypatch.setattr(module, "require_llguidance", lambda: library)
    schema = {"$defs": {f"d{i}": {"type": "string", "title": "x" * 500} for i in range(200)}, "properties": {}}
    schema["properties"] = {f"p{i}": {"type": "null"} for i in range(500)}
    module.place_of_fault(json.dumps(schema), {}, "no such fault")
    assert 0 < sum(compiled) <= 1 << 21


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [1, -(2**63)]},
        {"const": {"a": [2**64 - 1]}},
        {"const": 1e23},
        {"enum": [0.23861592861522019]},  # the compiler reads the next float
        '{"const": 0.12345678901234567890}',
        '{"minimum": 9007199254740993.0}',
        '{"enum": [1e-999]}',
    ],
)
def test_a_number_that_would_be_rounded_is_refused(schema):
    with pytest.raises(ValueError, match=r"would be rounded|in a schema is kept as"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    ("number", "text"),
    [*((n, str(n)) for n in (2**53, -(2**53), 2**54 + 4, 10**22, 0.1, -12.375, 123456789.125)), (1e-7, "0.0000001")],
)
def test_a_number_that_floats_keep_is_written(number, text):
    assert accepts({"const": number}, text)


LARGE = [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (-1e300, 1e300), (2**53 + 1, 2**53 + 9), (-(2**60) - 1, 0.1 + 0.2)]


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("names", [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
@pytest.mark.parametrize("bounds", LARGE, ids=str)
def test_what_is_written_is_within_large_bounds(bounds, names, kind):
    compiled = grammar({"type": kind, **dict(zip(names, bounds, strict=True))})
    assert compiled.fault() is None
    for seed in range(8):
        tokens = drawn(compiled.matcher(), random.Random(seed))
        assert tokens is not None
        value = fractions.Fraction(demo_tokenizer().decode(tokens))
        assert fractions.Fraction(bounds[0]) <= value <= fractions.Fraction(bounds[1])
        assert names[0] == "minimum" or value not in bounds


@pytest.mark.parametrize(
    "bounds",
    [{"minimum": -1e300, "maximum": -1e299}, {"minimum": 2**63, "maximum": 2**64}, {"exclusiveMaximum": -(2**63)}],
)
def test_bounds_that_only_numbers_beyond_64_bits_are_within_are_refused(bounds):
    with pytest.raises(ValueError, match="numbers beyond 64 bits are no JSON numbers"):
        grammar({"type": "integer", **bounds})


def test_a_bound_that_the_compiler_reads_as_another_moves_inward():
    low = 0.23861592861522019
    assert not is_kept(low)
    made = json.loads(compiled_schema(json.dumps({"minimum": low, "maximum": 1, "exclusiveMaximum": True})))
    assert low < made["minimum"] < low + 1e-16 and is_kept(made["minimum"])
    assert made["exclusiveMaximum"] == 1 and "maximum" not in made
