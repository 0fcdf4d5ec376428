"""A oneOf whose branches may overlap is written as a union of narrower ones: what is written matches exactly one."""

import json
import random

import jsonschema
import pytest

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.text.structured.compiled_schema import compiled_schema
from ferrum_jax.text.structured.grammars import Grammars
from ferrum_jax.text.structured.overlap import Overlap
from tests.histories import seeded
from tests.rows import rows_beside
from tests.structured.vocabularies import END, allowed, demo_tokenizer, demo_vocabulary

ROWS = rows_beside(__file__)

AB = {"a": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}, "c": {"type": "null"}}
THING = {"type": "object", "properties": AB, "additionalProperties": False}


def kind_of(kind: str, **more) -> dict:
    return {
        "type": "object",
        "properties": {"kind": {"enum": [kind]}, "n": {"type": "integer"}},
        "additionalProperties": False,
        **more,
    }


# schema, what is written, and what matches none or several branches
CASES = [
    *ROWS["cases"],
    ({**THING, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}, {"b": True}], [{"a": 1, "b": True}, {}]),
    ({**THING, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
     [{"a": 1}, {"c": None}], [{"b": True, "c": None}]),
    ({"properties": AB, "additionalProperties": False, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}], ["x", {}]),
    ({"oneOf": [{**THING, "required": ["a", "b"]}, {**THING, "required": ["c"]}]},
     [{"a": 1, "b": True}], [{"a": 1, "b": True, "c": None}]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
      "$defs": {"a": kind_of("a", required=["kind"]), "b": kind_of("b", required=["kind", "n"])}},
     [{"kind": "a"}, {"kind": "b", "n": 1}, None], [{"kind": "b"}]),
    ({"oneOf": [kind_of("a"), kind_of("b")]}, [{"kind": "a"}, {"kind": "b", "n": 1}], [{}, {"n": 1}]),
    ({"oneOf": [{"allOf": [{"type": "object"}, {"required": ["a"]}], "properties": AB, "additionalProperties": False},
                {"type": "object", "properties": AB, "required": ["b"], "additionalProperties": False}]},
     [{"a": 1}, {"b": True}], [{"a": 1, "b": True}]),
]  # fmt: skip


def accepts(grammar, value) -> bool:
    matcher = grammar.matcher()
    return matcher.replay(demo_tokenizer().encode(json.dumps(value))) and matcher.may_end


@pytest.mark.parametrize(("schema", "written", "not_written"), CASES, ids=lambda value: None)
def test_what_matches_exactly_one_branch_comes_and_nothing_else(schema, written, not_written):
    grammar, check = (
        Grammars(demo_vocabulary()).get(StructuredOutputsParams(json=schema)),
        jsonschema.Draft202012Validator,
    )
    for value in written:
        assert check(schema).is_valid(value) and accepts(grammar, value), value
    for value in not_written:
        assert not accepts(grammar, value), value
    drawing = random.Random(seeded(7))
    texts = [text for _ in range(12) if (text := drawn_text(grammar.matcher(), drawing)) is not None]
    assert texts
    for text in texts:
        check(schema).validate(json.loads(text))


def drawn_text(matcher, drawing: random.Random) -> str | None:
    """A text that ends at random moments; None where it grows too long."""
    tokens: list[int] = []
    while len(tokens) < 60:
        choices = allowed(matcher)
        if END in choices and (len(choices) == 1 or drawing.random() < 0.6):
            return demo_tokenizer().decode(tokens)
        token = drawing.choice([each for each in choices if each != END])
        assert matcher.advance(token)
        tokens.append(token)
    return None


@pytest.mark.parametrize(
    ("schema", "match"),
    [
    *ROWS["branches that cannot be told apart are refused with their place"],
    ({"oneOf": [{"type": "array", "items": {"type": kind}} for kind in ("null", "boolean")]}, "may both match"),
    ({"oneOf": [{"const": number} for number in range(400)]}, "has too many branches to be told apart"),
],
)  # fmt: skip
def test_branches_that_cannot_be_told_apart_are_refused_with_their_place(schema, match):
    asked = StructuredOutputsParams(json=schema)
    with pytest.raises(ValueError, match=match):
        Grammars(demo_vocabulary()).get(asked)


def test_a_proof_gives_up_by_count_and_recursion_ends():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert not Overlap(node).is_impossible([node, node])
    wide = {"anyOf": [{"anyOf": [{"type": "object"}] * 40}] * 40}
    assert not Overlap(wide).is_impossible([wide, wide, wide])


def test_references_into_a_one_of_are_left_to_the_compiler():
    schema = {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]}
    assert json.loads(compiled_schema(json.dumps(schema))) == schema
