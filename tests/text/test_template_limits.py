"""A template that would never end, or fill the memory, ends in one error; those of the field are not touched by it."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.text import ChatTemplate, template_limits
from tests.support import written_by

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}] * 3
DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(200) %}{% set ns.x = DOUBLED %}{% endfor %}{{ USE }}"


def doubled(start: str, step: str, use: str = "ns.x|length") -> str:
    return DOUBLE.replace("START", start).replace("DOUBLED", step).replace("USE", use)


LONG = "{% set s = START %}{% for i in range(90000) %}{% for j in range(90000) %}{{ USE }}{% endfor %}{% endfor %}"
COSTLY = {
    "spaces that are taken off": LONG.replace("START", "' ' * 2000000").replace("USE", "s|trim"),
    "a search that finds nothing": LONG.replace("START", "range(90000)|list").replace(
        "USE", "s|select('eq', -1)|first"
    ),
    "the least of many": LONG.replace("START", "range(90000)|list").replace("USE", "s|min"),
    "words in capitals": LONG.replace("START", "'a-' * 4000000").replace("USE", "s|title"),
    "words that are counted": LONG.replace("START", "'a ' * 4000000").replace("USE", "s|wordcount"),
    "a format of many fields that are none": "{{ ('{' ~ ':' * 8000000).format(1) }}",
    "a format of many names that are none": "{{ ('%(' * 4000000) % {} }}",
    "repetition": "{{ 'a' * 10**11 }}",
    "repetition of a constant": "{{ 'a' * 100000000000 }}",
    "repetition from the left": "{{ 10**11 * ['a'] }}",
    "a power": "{{ 10 ** (10**10) }}",
    "a product": doubled("3", "ns.x * ns.x", "ns.x"),
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' }}{% endfor %}{% endfor %}",
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large range": "{% for a in range(10**9) %}{% endfor %}",
    "a loop that calls itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a macro that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a macro that calls itself twice": (
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(90) }}"
    ),
    "a macro with much text": (
        "{% set x = 'a' * 90000 %}{% macro a() %}{% for i in range(90000) %}{{ x }}{% endfor %}{% endmacro %}{{ a() }}"
    ),
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
    "a format": "{{ '%99999999999d' % 1 }}",
    "a format with a value as its width": "{{ '%*d' % (99999999999, 1) }}",
    "a format by the filter": "{{ '%-99999999999s'|format('a') }}",
    "str.format": "{{ '{:>99999999999}'.format(1) }}",
    "str.format with a value as its width": "{{ '{:{}}'.format(1, 99999999999) }}",
    "str.format with one value many times": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "padding": "{{ 'a'.ljust(99999999999) }}",
    "padding by the filter": "{{ 'a'|center(99999999999) }}",
    "an indent": "{{ ('\n' * 9999)|indent(9999) }}",
    "an indent of JSON": "{{ [1]|tojson(indent=99999999999) }}",
    "an indent of deep JSON": doubled("1", "[ns.x] * 2", "ns.x|tojson(indent=60)"),
    "tabs": "{{ ('\t' * 9999).expandtabs(9999) }}",
    "a batch": "{{ [1]|batch(99999999999, 'x')|list }}",
    "searching again and again": "{% set x = 'a' * 8000000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "searching backwards": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "a sum of lists": "{{ range(99999)|batch(1)|sum(start=[])|length }}",
    "sorting lists": "{% for i in range(99999) %}{{ range(99999)|list|sort|length }}{% endfor %}",
    "splitting": "{% for i in range(99999) %}{{ ('a ' * 99999).split()|length }}{% endfor %}",
    "a date": "{{ strftime_now('%99999999Y') }}",
    "bytes of a number": "{{ (1).to_bytes(99999999999, 'big') }}",
    "a translation": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "an exception with much text": "{{ raise_exception('a' * 999999) }}",
    "filters in a map": "{{ range(99999)|map('center', 9999)|join|length }}",
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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s in %d of 100000' % ('a', 5) }}", "a in 5 of 100000"),
        ("{{ '(%s) 20251125' % 'a' }}{{ '%(x)5s|' % {'x': 1} }}{{ 'a b'|title }}", "(a) 20251125    1|A B"),
        ("{{ '{0}: {1:>4}'.format('a', 5) }}", "a:    5"),
        (
            "{{ 'a,b'|replace(',', ';') }}{{ [1, 2]|join('-') }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 7 % 4 }}",
            "a;b1-21024abab3",
        ),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'a\nb'|indent(2) }}{{ messages|length }}{{ messages|map(attribute='role')|list }}", "a\n  b1['user']"),
        ("{{ [1, 2, 3]|sum }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "61"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{{ loop.length }}{% endfor %}", "a1True1"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{% set x %}b{{ 1 }}{% endset %}{{ x }}", "<a>b1"),
        ("{% for a in [1, [2]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "12"),
        ("{{ 'x'.split('y')[-1].lstrip('\n') }}{{ 'a' if (1, 2) == (1, 2) and 'a' in ['a'] }}", "xa"),
        ("{{ missing }}{{ none }}{{ missing|default('d') }}{{ 1.5 }}{{ true }}", "Noned1.5True"),
        ("{% macro m() %}{{ caller(3) }}{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}", "3"),
    ],
)
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
