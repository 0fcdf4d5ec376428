"""The published schemas take what rows and servers take, and refuse what has another shape."""

import json
import re

import jsonschema
import pytest

from ferrum_jax import __main__ as cli
from ferrum_jax.openai.body_fields import BODIES, ROW_BODIES, fields_of
from ferrum_jax.openai.schemas import body_schema, row_schema
from tests.openai.sections import SECTIONS, recorded
from tests.rows import rows_beside

# Why a row is refused that has the right shape: what it has does not fit together, or not the model or the job.
NOT_OF_SHAPE = re.compile(
    r"twice|this job|max_model_len|more than max_tokens|must be at least 1$|differ|both say|beside|needs the text"
    r"|cannot be enforced|does not compile|the (chat template|prompt|text|pair|checkpoint)|without|tool_choice names"
    r"|too large|regex is 5|model( has '|'s vectors)|is told nothing|text_1 has 2 texts|generates nothing"
    r"|read two texts together|makes no vectors|lists, and there are"
)


def plain(schema: dict) -> dict:
    """As it is written."""
    return json.loads(json.dumps(schema, allow_nan=False))


def rows():
    for name, section in SECTIONS.items():
        for body, fields in section.bodies.items():
            said = recorded(name)[body].get("job")
            if section.path in ROW_BODIES and said is not None:
                yield f"{name}: {body}", section.path, fields, said


def test_the_schema_takes_answered_rows_and_refuses_other_shapes():
    schema = plain(row_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator, wrong = jsonschema.Draft202012Validator(schema), []
    for name, url, fields, said in rows():
        if "code" in said and NOT_OF_SHAPE.search(said["message"]):
            continue
        whole = {"custom_id": "a", "method": "POST", "url": url, "body": fields}
        if {validator.is_valid(row) for row in (whole, {"custom_id": "a", **fields})} != {"code" not in said}:
            wrong.append(f"{name}: {said.get('message', 'answered')}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("row", "is_taken"), rows_beside(__file__)["a row has one of two forms"])
def test_a_row_has_one_of_two_forms(row, is_taken):
    assert jsonschema.Draft202012Validator(plain(row_schema())).is_valid(row) is is_taken


def test_the_command_prints_the_schema_of_a_row_and_needs_no_model(capsys):
    with pytest.raises(SystemExit) as ended:
        cli._parser().parse_args(["batch", "--schema"])
    assert ended.value.code == 0 and json.loads(capsys.readouterr().out) == plain(row_schema())


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_body_is_described(body):
    schema = plain(body_schema(body, "http"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert all(schema["properties"][name]["description"] for name in fields_of(body, "http"))
