"""A template that would never end, or fill the memory, ends in one error; those of the field are not touched by it."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.text import ChatTemplate, template_limits
from tests.rows import rows_beside
from tests.support import written_by

ROWS = rows_beside(__file__)

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}] * 3
DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(200) %}{% set ns.x = DOUBLED %}{% endfor %}{{ USE }}"


def doubled(start: str, step: str, use: str = "ns.x|length") -> str:
    return DOUBLE.replace("START", start).replace("DOUBLED", step).replace("USE", use)


LONG = "{% set s = START %}{% for i in range(90000) %}{% for j in range(90000) %}{{ USE }}{% endfor %}{% endfor %}"
COSTLY = ROWS["costly"] | {
    "spaces that are taken off": LONG.replace("START", "' ' * 2000000").replace("USE", "s|trim"),
    "a search that finds nothing": LONG.replace("START", "range(90000)|list").replace(
        "USE", "s|select('eq', -1)|first"
    ),
    "the least of many": LONG.replace("START", "range(90000)|list").replace("USE", "s|min"),
    "words in capitals": LONG.replace("START", "'a-' * 4000000").replace("USE", "s|title"),
    "words that are counted": LONG.replace("START", "'a ' * 4000000").replace("USE", "s|wordcount"),
    "a product": doubled("3", "ns.x * ns.x", "ns.x"),
    "doubling with +": doubled("'a'", "ns.x + ns.x"),
    "doubling with ~": doubled("'a'", "ns.x ~ ns.x"),
    "doubling of a list": doubled("[1]", "ns.x + ns.x"),
    "nesting": doubled("[1]", "[ns.x, ns.x]", "ns.x"),
    "nesting of tuples": doubled("(1,)", "(ns.x, ns.x)", "{ns.x: 1}"),
    "nesting of dicts": doubled("1", "{'a': ns.x, 'b': ns.x}", "ns.x|tojson"),
    "nesting by calls": doubled("1", "dict(a=ns.x, b=ns.x)", "ns.x == ns.x"),
    "nesting of namespaces": doubled("1", "namespace(a=ns.x, b=ns.x)", "ns.x"),
    "replacing": doubled("'a'", "ns.x.replace('a', 'aa')"),
    "replacing by the filter": doubled("'a'", "ns.x|replace('a', 'aa')"),
    "joining": doubled("'aa'", "ns.x.join(['', '', ''])"),
    "joining by the filter": doubled("'aa'", "ns.x|join(ns.x)"),
    "a block": doubled("'a'", "z").replace("{% set ns.x = z %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "an indent of deep JSON": doubled("1", "[ns.x] * 2", "ns.x|tojson(indent=60)"),
    "many texts": doubled("[]", "ns.x + ['a' * 999999 ~ i]"),
}


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY)
def test_what_would_not_end_or_fill_the_memory_is_one_short_error(source, monkeypatch):
    monkeypatch.setattr(template_limits, "WORK", 1 << 16)  # a thirtieth of the time
    with pytest.raises(ValueError, match="the chat template") as stopped:
        ChatTemplate(source).render(TURNS)
    assert len(str(stopped.value)) < 1200


@pytest.mark.slow
def test_with_all_the_work_that_a_render_has_little_memory_is_taken():
    """In a process of its own: all of them in turn. (ru_maxrss would begin with what the parent had at the fork.)"""
    program = """
from pathlib import Path
from tests.text.test_template_limits import COSTLY, TURNS, ChatTemplate
for source in COSTLY.values():
    try:
        ChatTemplate(source).render(TURNS)
    except ValueError:
        continue
    raise SystemExit(f"{source} was rendered")
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")).split()[1])
"""
    assert int(written_by([sys.executable, "-c", program])) < 400 << 10  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 900 + "]" * 900 + " }}",
        "{{ 1" + "+1" * 50_000 + " }}",
        "{% for a in x %}" * 60 + "{% endfor %}" * 60,
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "9" * 5000 + " }}",
        "x" * 300_000,
        "{{ a|nofilter }}",
    ],
    ids=lambda source: source[:20],
)
def test_a_template_that_python_cannot_compile_is_refused(source):
    with pytest.raises(ValueError, match="the chat template") as refused:
        ChatTemplate(source).render(TURNS)
    assert len(str(refused.value)) < 1200


def test_the_same_template_ends_at_the_same_place_however_often():
    template = ChatTemplate("{% for m in messages %}{% for i in range(90000) %}{{ m.content }}{% endfor %}{% endfor %}")
    texts = set()
    for turns in (TURNS, TURNS[:1], TURNS):
        try:
            texts.add(template.render(turns)[:10])
        except ValueError as error:
            texts.add(str(error))
    assert len(texts) == 1, texts


def test_long_conversations_and_long_texts_are_rendered():
    """10,000 messages, and a text of a million tokens, through what the templates of the field do to them."""
    source = (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% if loop.index0 % 2 == 0 and m.role == 'user' %}"
        "{% set ns.last = m.content|trim %}{% endif %}{{ '<|' + m['role'] + '|>\n' ~ m.content.strip() + eos_token }}"
        "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{% endfor %}{{ ns.last[-1:] }}"
    )
    template = ChatTemplate(source, {"eos_token": "</s>"})
    text = template.render([{"role": "user", "content": "some words "}] * 10_000)
    assert text.count("<|user|>") == 10_000 and text.endswith("</s>s")
    assert len(template.render([{"role": "user", "content": "word " * 1_000_000}])) > 4_900_000


@pytest.mark.parametrize(("source", "text"), ROWS["what templates of the field do gives what it gave"])
def test_what_templates_of_the_field_do_gives_what_it_gave(source, text):
    assert ChatTemplate(source).render(TURNS[:1]) == text


PARTS = st.sampled_from(
    [
        *("messages", "'a'", "10**9", "[1]", "{'a':1}", "(1,2)", "+", "*", "**", "~", "%", "|"),
        *("(", ")", "[", "]", ".", ",", "center", "length", "tojson", "list", "join", "replace"),
        *("format", "namespace", "range(9)", "loop.index", "for", "in", "if", "else", "end"),
        *("set", "macro", "x", "=", "==", "1", "-", "items", "split", "upper"),
    ]
)


@given(st.lists(PARTS, max_size=12), st.lists(PARTS, max_size=8))
def test_whatever_a_template_says_it_gives_text_or_a_value_error(head, body):
    loop = f"{{% for y in messages %}}{{{{ {' '.join(head)} }}}}{{% endfor %}}"
    source = f"{{% set x = messages %}}{loop}{{{{ {' '.join(body)} }}}}"
    try:
        assert isinstance(ChatTemplate(source).render(TURNS), str)
    except ValueError as error:
        assert "the chat template" in str(error)
