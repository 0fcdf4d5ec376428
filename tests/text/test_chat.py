"""A checkpoint's chat template: rendered as it was written for, sandboxed, refused with reasons."""

from __future__ import annotations

import datetime
import json

import pytest

from ferrum_jax.text import ChatTemplate, Tokenizer, require_chat_template
from ferrum_jax.text.prompts import PromptEncoder
from tests.text.samples import folder

CHATML = """{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_chat_is_rendered_with_special_tokens_and_a_generation_prompt_if_wanted():
    template = ChatTemplate(CHATML, {"eos_token": "</s>"})
    assert template.render(TURNS) == "<|system|>Be brief.</s>\n<|user|>Hi</s>\n<|assistant|>"
    assert template.render(TURNS[1:], add_generation_prompt=False) == "<|user|>Hi</s>\n"


def test_blocks_are_trimmed_and_loops_can_break():
    source = (
        "  {% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n[{{ m.content }}]\n  {% endfor %}\n"
    )
    assert ChatTemplate(source).render(TURNS) == "[Be brief.]\n"


def test_template_arguments_and_tools_are_variables_and_json_is_not_escaped():
    source = "{{ enable_thinking }} {{ tools | tojson }} {{ {'b': 1, 'a': '<é>'} | tojson(indent=None) }}"
    text = ChatTemplate(source).render(TURNS, tools=[{"name": "f"}], enable_thinking=False)
    assert text == 'False [{"name": "f"}] {"b": 1, "a": "<é>"}'


def test_an_argument_that_the_template_never_reads_is_refused_by_name():
    source = "{% if not date is defined %}{% set date = 1 %}{% endif %}{{ date }}{{ messages[0].content }}"
    prompts = PromptEncoder(tokenizer=None, chat=ChatTemplate(source))
    variables = {"date": 2}
    assert prompts.render_chat(TURNS, chat_template_kwargs=variables, tools=[], add_generation_prompt=False) == (
        "2Be brief."
    )
    with pytest.raises(ValueError, match="the chat template reads no enable_thinking and no tools; leave it out"):
        prompts.render_chat(TURNS, chat_template_kwargs={"enable_thinking": True}, tools=[{"name": "f"}])
    with pytest.raises(ValueError, match="chat_template_kwargs has tools; give that as an argument of its own"):
        prompts.render_chat(TURNS, chat_template_kwargs={"tools": []})
    with pytest.raises(ValueError, match="chat_template_kwargs is 'date'; it must be an object"):
        prompts.render_chat(TURNS, chat_template_kwargs="date")


TRIMMED = CHATML.replace("message.content", "message.content | trim")


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [
        (CHATML, "It is", "<|assistant|>It is"),
        (CHATML, "It is \n", "<|assistant|>It is \n"),
        (CHATML, "", "<|assistant|>"),
        (TRIMMED, " It is \n", "<|assistant|>It is"),
        (TRIMMED, "", "<|assistant|>"),
    ],
)
def test_a_final_message_that_is_continued_is_the_end_of_the_prompt(source, content, end):
    prompts = PromptEncoder(tokenizer=None, chat=ChatTemplate(source, {"eos_token": "</s>"}))
    turns = [TURNS[1], {"role": "assistant", "content": content}]
    text = prompts.render_chat(turns, continue_final_message=True)
    assert text == "<|user|>Hi</s>\n" + end


def test_a_final_message_that_cannot_be_continued_is_refused():
    prompts = PromptEncoder(tokenizer=None, chat=ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(ValueError, match="does not write the last message as it is"):
        prompts.render_chat(TURNS, continue_final_message=True)
    with pytest.raises(ValueError, match="needs a last message with a text"):
        prompts.render_chat([{"role": "assistant", "tool_calls": []}], continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message and add_generation_prompt are both true"):
        prompts.render_chat(TURNS, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ValueError, match="continue_final_message is 1; it must be true or false"):
        prompts.render_chat(TURNS, continue_final_message=1)


def test_a_generation_block_is_only_its_text():
    assert ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}!").render(TURNS) == "Be brief.!"


def test_the_date_is_that_of_the_clock_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(TURNS, datetime.datetime(2024, 7, 26)) == "26 Jul 2024"


def test_text_parts_become_one_text_and_other_parts_are_refused():
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(ValueError, match=r"messages\[0\].content holds .*input_smell"):
        template.render([{"role": "user", "content": [{"type": "input_smell"}]}])


@pytest.mark.parametrize("parts", [[{"type": "image"}], [{"type": "text", "text": "a"}, {"type": "image_url"}]])
def test_a_place_for_an_image_without_one_is_refused(parts):
    encoder = PromptEncoder(tokenizer=None, chat=ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(ValueError, match=r"have 1 parts that are images, and 0 images are given"):
        encoder.token_ids([{"role": "user", "content": parts}])


@pytest.mark.parametrize("messages", [[], [{}], ["hi"], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_what_is_no_message_is_refused(messages):
    with pytest.raises(ValueError, match="message"):
        ChatTemplate(CHATML).render(messages)


def test_a_message_with_tool_calls_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert ChatTemplate("{{ messages[0].tool_calls[0].name }}").render([call]) == "f"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ missing.field }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_error_about_the_messages(source):
    with pytest.raises(ValueError, match="the chat template refuses these messages"):
        ChatTemplate(source).render(TURNS)


def test_a_template_that_does_not_parse_is_refused_with_its_line():
    with pytest.raises(ValueError, match="does not parse, line 2"):
        ChatTemplate("\n{% if %}")


def test_a_template_is_found_in_its_own_file_or_in_the_configuration(tmp_path):
    assert ChatTemplate.load(folder(tmp_path)) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}d"}]
    assert ChatTemplate.load(folder(tmp_path, chat_template=named)).render(TURNS) == "<s>d"
    assert ChatTemplate.load(folder(tmp_path, chat_template="c{{ eos_token }}")).render(TURNS) == "c</s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert ChatTemplate.load(tmp_path).render(TURNS) == "j"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert ChatTemplate.load(tmp_path).render(TURNS) == "own"


def test_templates_without_a_default_and_folders_without_a_template_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"\['rag'\].*'default'"):
        ChatTemplate.load(folder(tmp_path, chat_template=[{"name": "rag", "template": "r"}]))
    with pytest.raises(ValueError, match=r"\['default'\]; one of them must be 'default', and a text"):
        ChatTemplate.load(folder(tmp_path, chat_template=[{"name": "default"}, "no template"]))
    with pytest.raises(ValueError, match="no chat template: give a prompt as text"):
        require_chat_template(None, tmp_path)


def test_a_bos_that_the_template_writes_is_not_doubled(tmp_path):
    path = folder(tmp_path, "sentencepiece", chat_template="{{ bos_token }}{{ messages[0].content }}")
    text = ChatTemplate.load(path).render(TURNS)
    own = Tokenizer.load(path)
    assert own.encode(text, add_special_tokens=False).count(1) == 1
    assert own.encode(text).count(1) == 1


def test_special_tokens_are_added_where_they_are_asked_for(tmp_path):
    tokenizer = Tokenizer.load(folder(tmp_path, "byte_level", add_bos_token=True))
    prompts = PromptEncoder(tokenizer=tokenizer, chat=ChatTemplate("{{ messages[0].content }}"))
    bare, full = (tokenizer.encode("a b", add_special_tokens=adds) for adds in (False, True))
    assert bare != full
    messages = [{"role": "user", "content": "a b"}]
    assert prompts.token_ids("a b") == prompts.token_ids({"prompt": "a b", "add_special_tokens": True}) == full
    assert prompts.token_ids({"prompt": "a b", "add_special_tokens": False}) == bare
    assert prompts.token_ids(messages) == prompts.token_ids({"messages": messages}) == bare
    assert prompts.token_ids({"messages": messages, "add_special_tokens": True}) == full
    with pytest.raises(ValueError, match="add_special_tokens is 1; it must be true or false, beside a text"):
        prompts.token_ids({"prompt": "a b", "add_special_tokens": 1})
    with pytest.raises(ValueError, match="continue_final_message is for messages, and the prompt is prompt"):
        prompts.token_ids({"prompt": "a b", "continue_final_message": True})
