"""A server describes itself: every path, with bodies that it takes, and errors as it writes them."""

import json
import re

import jsonschema
import pytest

from ferrum_jax.serve.app.application import answered
from ferrum_jax.serve.app.openapi import description
from ferrum_jax.serve.http.settings import ServerSettings
from tests.openai.sections import SECTIONS, recorded
from tests.rows import rows_beside
from tests.serve.running import running

# What OpenAPI 3.1 demands of the objects that are used here.
OPENAPI = rows_beside(__file__)["openapi"]


@pytest.fixture(scope="module")
def described() -> dict:
    return json.loads(json.dumps(description(tuple(answered()), "1.2.3"), allow_nan=False))


def test_the_description_is_openapi_whose_schemas_are_schemas(described):
    jsonschema.validate(described, OPENAPI)
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = [each["operationId"] for path in described["paths"].values() for each in path.values()]
    assert len(set(named)) == len(named)
    assert all(each["summary"] for path in described["paths"].values() for each in path.values())
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(described))
    assert set(references) == set(described["components"]["schemas"])


def test_a_path_takes_the_bodies_that_are_answered_there(described):
    schemas, count = described["components"]["schemas"], 0
    for name, section in SECTIONS.items():
        content = described["paths"][section.path]["post"]["requestBody"]["content"]["application/json"]
        validator = jsonschema.Draft202012Validator(schemas[content["schema"]["$ref"].rsplit("/", 1)[1]])
        for body, fields in section.bodies.items():
            said = recorded(name)[body].get("http")
            if said is not None and "message" not in said and not section.ignores:
                assert validator.is_valid(fields), (name, body, list(validator.iter_errors(fields))[:1])
                count += 1
            if said is not None and "message" in said:
                jsonschema.validate({"error": said}, schemas["error"])
    assert count > 100


def test_a_server_has_its_description_and_a_page_of_it_without_a_script(described):
    with running(ServerSettings(names=("small",), version="1.2.3")) as server:
        status, _, found = server.ask("/openapi.json")
        assert status == 200 and found == described
        status, headers, page = server.ask("/docs")
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    page = page if isinstance(page, str) else page.decode()
    assert "<script" not in page and "src=" not in page
    for path, methods in described["paths"].items():
        assert all(f"{method.upper()} {path}" in page for method in methods)
    for name in ("max_completion_tokens", "return_documents", "load_inplace"):
        assert f"<td>{name}</td>" in page
