"""Forms of calls and reasoning, by what models are known to write: whole, streamed, and demanded."""

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import tools_asked, tools_of
from ferrum_jax.text.structured.forms.reasoning_forms import REASONING_FORMS
from ferrum_jax.text.structured.forms.tool_forms import TOOL_FORMS, tool_form_named, written
from ferrum_jax.text.structured.grammars import Grammars
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.structured.vocabulary import Vocabulary
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer
from scripts import csv_tables
from tests.histories import seeded
from tests.rows import rows_beside
from tests.structured.form_samples import DEMANDED, SAMPLES, TEMPLATES, TOOLS
from tests.structured.vocabularies import END, allowed, demo_tokenizer, demo_vocabulary, drawn, fed

ROWS = rows_beside(__file__)

KNOWN = tools_of(TOOLS)


def forms_and_how(sample):
    tools, reasoning = sample.forms
    forms = MessageForms.of_template(None, tools=tools, reasoning=reasoning)
    return forms, {"tools": KNOWN, "is_open": sample.is_open}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_models_write_is_read(name):
    sample = SAMPLES[name]
    forms, how = forms_and_how(sample)
    found = forms.message(sample.text, **how)
    calls = [(call.name, json.loads(call.arguments), *([call.id] if call.id else [])) for call in found.tool_calls]
    assert (found.content, found.reasoning, calls) == (sample.content, sample.reasoning, list(sample.calls))


def test_each_form_has_a_sample():
    for place, table in enumerate((TOOL_FORMS, REASONING_FORMS)):
        seen = {sample.forms[place] for sample in SAMPLES.values()}
        assert not [form.name for form in table if seen.isdisjoint((form.name, *form.vllm))]


TEXTS = [*(sample.text for sample in SAMPLES.values()), *DEMANDED.values()]
TEXTS += [
    "<|channel|>?<|message|>a<|channel|>final <|constrain|>json<|message|>{}<|return|>",
    "  \n<tool_call> nothing <|im_<|im_end|>end|>",
]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|end|>", "<|start|>"]


@settings(max_examples=600)
@given(
    st.sampled_from(sorted(SAMPLES)),
    *(st.sampled_from(TEXTS), st.sampled_from((None, *TOOL_FORMS)), st.sampled_from((None, *REASONING_FORMS))),
    *(st.booleans(), st.integers(0, 400), st.integers(0, 10**6)),
)
def test_a_text_is_the_same_message_however_it_is_cut(name, other, tools, reasoning, is_open, length, seed):
    """In the forms of its model, or in others."""
    sample, rng = SAMPLES[name], random.Random(seed)
    forms, how = forms_and_how(sample)
    if rng.random() < 0.4:
        forms = MessageForms(tools=tools, reasoning=reasoning)
        how = {"tools": (), "is_open": is_open, "specials": SPECIAL}
    text = rng.choice([sample.text, sample.text[:length], sample.text[:length] + other, other])
    stream = forms.stream(**how)
    parts = [*fed(stream.feed, text, rng), *stream.flush()]
    assert forms.joined(parts) == forms.message(text, **how)
    assert all(bool(part.content) + bool(part.reasoning) + len(part.tool_calls) == 1 for part in parts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_shows_its_forms(name):
    template, *expected = TEMPLATES[name]
    assert list(MessageForms.of_template(f"{{% if tools %}}{template}{{% endif %}}").names) == expected


VLLM = (
    "hermes llama3_json llama4_pythonic llama4_json mistral deepseek_v3 deepseek_v31 qwen3_coder qwen3_xml glm45 "
    "kimi_k2 minimax_m2 seed_oss phi4_mini_json granite granite4 granite-20b-fc olmo3 pythonic hunyuan_a13b openai "
    "cohere_command3 gemma4 functiongemma lfm2 nemotron_json jamba internlm longcat"
)
VLLM_REASONING = (
    "deepseek_r1 deepseek_v3 qwen3 glm45 granite hunyuan_a13b seed_oss kimi_k2 minimax_m2 openai_gptoss mistral olmo3 "
    "gemma4 cohere_command3"
)


def test_names_of_vllms_parsers_are_understood():
    for name in VLLM.split():
        assert MessageForms.of_template(None, tools=name).tools is not None
    for name in VLLM_REASONING.split():
        assert MessageForms.of_template(None, reasoning=name).reasoning is not None
    forms = MessageForms.of_template("<tool_call></think>", tools="openai")
    assert forms.names == ("harmony", "think") and MessageForms.named(*forms.names) == forms


@pytest.mark.parametrize("which", ["tools", "reasoning"])
def test_names_that_mean_nothing_are_refused_with_those_that_do(which):
    known = {"tools": "harmony, openai, .*llama3_json", "reasoning": "harmony, .*think, deepseek_r1"}[which]
    with pytest.raises(ValueError, match=f"is named 'x'; there are {known}"):
        MessageForms.of_template(None, **{which: "x"})


def test_a_name_means_one_form():
    for table in (TOOL_FORMS, REASONING_FORMS):
        names = [name for form in table for name in (form.name, *form.vllm)]
        assert len(names) == len(set(names))
    assert DEMANDED.keys() == {form.name for form in TOOL_FORMS}


def vocabulary_with(specials, folder):
    """The demo vocabulary with special tokens in it. folder: where its file is written."""
    known = json.loads(demo_tokenizer().to_json())
    blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = demo_tokenizer().vocab_size
    known["added_tokens"] += [{"id": first + n, "content": text, **blank} for n, text in enumerate(specials)]
    (folder / "tokenizer.json").write_text(json.dumps(known))
    tokenizer = require_tokenizer(Tokenizer.load(folder), folder)
    return tokenizer, Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=frozenset({END}))


SPECIALS = ROWS["specials"]


def accepts(vocabulary, tokenizer, name, text):
    """Whether the grammar of demanded calls allows this text as a whole, token by token."""
    asked = StructuredOutputsParams(tools=tools_asked(TOOLS, "required", True))
    matcher = Grammars(vocabulary, tool_form_named(name)).get(asked).matcher()
    return all(matcher.advance(token) for token in tokenizer.encode(text, add_special_tokens=False)) and matcher.may_end


@pytest.mark.parametrize("name", DEMANDED)
def test_a_grammar_allows_what_a_template_shows_and_the_parser_reads_it(name):
    text = DEMANDED[name]
    assert accepts(demo_vocabulary(), demo_tokenizer(), name, text)
    calls = MessageForms.of_template(None, tools=name).message(text, tools=KNOWN).tool_calls
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    assert found == [("weather", {"city": "Oslo", "days": 3}), ("now", {})][: len(found)] and found


@pytest.mark.parametrize("name", SPECIALS)
def test_marks_that_are_special_tokens_stand_in_grammars_by_their_ids(name, tmp_path):
    tokenizer, vocabulary = vocabulary_with(SPECIALS[name], tmp_path)
    assert len(tokenizer.encode(DEMANDED[name])) < len(demo_tokenizer().encode(DEMANDED[name]))
    assert accepts(vocabulary, tokenizer, name, DEMANDED[name])


LINES = ROWS["lines"]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(("more", "allowed"), [(" </function> <parameter=x>", True), ("\n</function>", False),
                                               ("\n  <parameter=x>", False), ("\n<p>", True)])  # fmt: skip
def test_a_text_without_quotes_has_no_line_that_would_end_it(name, more, allowed):
    text = LINES[name].format(more)
    assert accepts(demo_vocabulary(), demo_tokenizer(), name, text) == allowed
    calls = MessageForms.of_template(None, tools=name).message(text, tools=KNOWN).tool_calls
    assert ([json.loads(call.arguments) for call in calls] == [{"city": f"Oslo{more}"}]) == allowed


NESTED = ROWS["nested"]


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_nested_arguments_between_quotes_are_valid(name):
    tool = {"type": "function", "function": {"name": "f", "parameters": NESTED}}
    asked = StructuredOutputsParams(tools=tools_asked([tool], "required", False))
    forms, rng, count = MessageForms.of_template(None, tools=name), random.Random(seeded(3)), 0
    grammar = Grammars(demo_vocabulary(), forms.tools).get(asked)
    for _ in range(12):
        tokens = drawn(grammar.matcher(), rng, most=150)
        if tokens is not None:
            (call,) = forms.message(demo_tokenizer().decode(tokens, skip_special_tokens=False), tools=()).tool_calls
            jsonschema.validate(json.loads(call.arguments), NESTED)
            count += 1
    assert count >= 4


@pytest.mark.parametrize(("schema", "match"), ROWS["what texts between quotes cannot be held to is refused"])
def test_what_texts_between_quotes_cannot_be_held_to_is_refused(schema, match):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    asked = StructuredOutputsParams(tools=tools_asked([tool], "required", False))
    with pytest.raises(ValueError, match=match):
        Grammars(demo_vocabulary(), tool_form_named("gemma4")).get(asked)


def in_cell(text):
    return "" if not text else f"`` {text} ``" if "`" in text else f"`{text}`"


def shown(form):
    """A call of f with "x" for its argument a, as the form's grammar writes it."""
    parameters = {
        "type": "object",
        "properties": {"a": {"const": "x"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = StructuredOutputsParams(tools=tools_asked([tool], {"type": "function", "function": {"name": "f"}}, None))
    matcher, tokens, zero = Grammars(demo_vocabulary(), form).get(asked).matcher(), [], demo_tokenizer().encode("0")[-1]
    while not matcher.must_end:
        choices = allowed(matcher)
        longest = max(choices, key=lambda token: (len(demo_tokenizer().decode([token])), token))
        tokens.append(zero if zero in choices else longest)
        assert matcher.advance(tokens[-1])
    return demo_tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False)


def test_the_guide_s_tables_have_a_row_for_each_form():
    calls = [
        [form.name, ", ".join(map(in_cell, form.vllm)), in_cell(shown(form).replace("\n", "⏎"))] for form in TOOL_FORMS
    ]
    assert csv_tables.read("tool_forms")[1:] == calls
    thoughts = [
        [
            form.name,
            ", ".join(map(in_cell, form.vllm)),
            in_cell(f"{written(form.begin)}..{written(form.end)}".replace("\n", "⏎")),
            in_cell("..".join(form.answer or ())),
        ]
        for form in REASONING_FORMS
    ]
    assert csv_tables.read("reasoning_forms")[1:] == thoughts
