"""Patterns of module names say what `re` says, and end after as many steps as name and pattern are long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.names.patterns import Pattern
from tests.rows import rows_beside

NAMES = ["", "lm_head", "model.layers.0.mlp.gate", "model.layers.10.mlp.gate_proj", "model.layers.3.self_attn.q_proj"]
NAMES += ["layers.3.mlp.experts.12.up_proj", "a.b", "aaab", "Müller_٣ x", "model.layers.3.self_attn.q_proj.base_layer"]
ORDINARY = [
    *("q_proj", r".*", r".*mlp.gate$", r"^model\.layers\.(0|1|10)\.mlp", r".*\.(?:gate|up)(?:_proj)?$"),
    *(r"(.*\.)?(q_proj|v_proj)$", r".*layers\.[0-3]\..*", r".*experts\.\d+\..*", r"[^.]+\.[^.]+"),
    *(r"model\.layers\.\d{1,2}\.self_attn.*", "(a|b)*b", "a{2}", "a{2,}", "a{,2}b", "a+?b", "()*", "(a*)*b", "a{0}"),
    *(r"(?!.*mlp).*", r".*layers\.(?!3\.).*", ".*(?<=q)_proj", r".*(?<!gate)_proj$", "(?=.*self_attn).*q_proj"),
    *(r"\w+\Z", r"\S+\s\S", r"\W", r"\D*", r"[\w.]+", r"[^\d.]+[._]\D", "^$", "lm_head|embed|", "x*", "(|a){3}b"),
    *(r"\Alm_head", "a{60000}", "((a{100}){100}){100}", r"^(?!.*mlp)(?!.*embed).*\b(q|v)_proj", "(?=.*(?=_proj)).*q"),
    r"(?:.*?(?:language|layers).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.)",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_patterns_match_the_names_that_re_matches(text):
    pattern = Pattern(text)
    for name in NAMES * 2:  # the second time from what is known
        assert pattern.match(name) == bool(re.match(text, name)), name


PARTS = st.recursive(
    st.sampled_from(["a", "b", ".", "\\.", "[ab]", "[^a]", "\\w", "^", "$", ""]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}")
    ),
    max_leaves=8,
)


@given(PARTS, st.text("ab.", max_size=7))
def test_whatever_is_put_together_matches_what_re_matches(text, name):
    assert Pattern(text).match(name) == bool(re.match(text, name))


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a|a)*$", "(.*a){20}$", "(a*)*(a*)*b", "(?:a?){30}a{30}$", "(.*)*(.*)*(.*)*x", "(?!(a+)+$).*x"]
)
def test_a_pattern_for_which_re_would_take_years_ends(text):
    pattern, name = Pattern(text), "a" * 200 + "!"
    pattern.match(name)
    assert pattern.steps <= 1_000_000


def test_a_pattern_that_takes_too_many_steps_is_refused_with_the_name():
    with pytest.raises(ValueError, match=r"takes more than 1000000 steps for 'aaa"):
        Pattern(".*(?=(.*a)*x)x").match("a" * 3000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *rows_beside(__file__)["what is left out is refused by name"],
        ("(" * 60 + ")" * 60, "it is nested too deeply"),
        ("(" * 5000 + ")" * 5000, "it is nested too deeply"),
        ("a" * 10_001, "it has 10001 characters, more than 10000"),
    ],
)
def test_what_is_left_out_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        Pattern(text)


def test_a_repeat_of_nothing_is_nothing():
    assert Pattern("((){4000000000}){4000000000}a").match("a")
