"""A checkpoint's chat template: rendered as it was written for, sandboxed, refused with reasons.

Templates of the families give the reference's texts.
"""

import datetime
import json
from pathlib import Path

import pytest

from checkpoints.folder import COMPANIONS
from ferrum_jax.openai.contents import messages_of
from ferrum_jax.text import ChatTemplate, Tokenizer, require_chat_template
from ferrum_jax.text.prompts import PromptEncoder
from tests.rows import rows_beside
from tests.text.samples import folder

ROWS = rows_beside(__file__)

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


@pytest.mark.parametrize("source", ROWS["what a template refuses or may not do is an error about the messages"])
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


def _call(arguments, name="find"):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLING = ROWS["templates of calls"]  # like those of the families
DOORS = {"LLM.chat": list, "HTTP and rows": lambda messages: messages_of("messages", messages)}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("content", [None, "", "look", ...])
@pytest.mark.parametrize("name", CALLING)
def test_calls_in_the_history_are_written_as_the_template_reads_them(name, content, door):
    said = {"role": "assistant", "content": content, "tool_calls": [_call('{"q":"Zürich"}'), _call("null", "now")]}
    if content is ...:
        del said["content"]
    result = {"role": "tool", "tool_call_id": "c1", "content": "there"}
    text = ChatTemplate(CALLING[name]).render(DOORS[door]([{"role": "user", "content": "where?"}, said, result]))
    arguments = {"objects": ["q=Zürich", ""], "objects as JSON, content in parts": ['{"q": "Zürich"}', "{}"]}
    first, second = arguments.get(name, ['{"q":"Zürich"}', "{}"])
    assert f"[CALL find {first}][CALL now {second}]" in text and text.endswith("[there]") and "None" not in text
    assert ("[look]" in text) == (content == "look")


@pytest.mark.parametrize("door", DOORS)
def test_a_text_beside_calls_is_no_message_of_its_own_where_turns_alternate(door):
    source = (
        "{% for m in messages if m.role != 'tool' and m.tool_calls is not defined %}{% if (m.role == 'user') != "
        "(loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls[0].function | tojson }}{% else %}"
        "[{{ m.content }}]{% endif %}{% endfor %}"
    )  # as Mistral's
    said = {"role": "assistant", "content": "look", "tool_calls": [_call('{"q": 1}')]}
    user, b = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chat = [user, said, {"role": "tool", "content": "there"}, b, user]
    texts = [ChatTemplate(source).render(DOORS[door](chat[:size])) for size in (3, 5)]
    assert '{"name": "find", "arguments": {"q": 1}}[there]' in texts[0] and texts[1].startswith(texts[0] + "[b]")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("known", [["system"], ["system", "developer"]])
def test_a_developers_message_is_the_systems_where_the_template_knows_no_other(known, door):
    source = "{% for m in messages if m.role in ['user', *] %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    template = ChatTemplate(source.replace("*", str(known)[1:-1]))
    chat = [{"role": "developer", "content": "Be kind"}, {"role": "user", "content": "hi"}]
    assert template.render(DOORS[door](chat)) == f"{known[-1]}: Be kind. user: hi. "


@pytest.mark.parametrize("given", ["null", "", " null ", "{}", None, {}])
@pytest.mark.parametrize("door", DOORS)
def test_calls_without_arguments_have_an_empty_object(given, door):
    messages = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [_call(given, "now")]}]
    assert "[CALL now ]" in ChatTemplate(CALLING["objects"]).render(DOORS[door](messages))
    assert "[CALL now {}]" in ChatTemplate(CALLING["calls as texts, as V3.1"]).render(DOORS[door](messages))


def test_calls_that_a_template_never_writes_are_refused():
    prompts = PromptEncoder(tokenizer=None, chat=ChatTemplate(CHATML))
    with pytest.raises(ValueError, match="writes no tool_calls; leave them out"):
        prompts.render_chat([*TURNS, {"role": "assistant", "content": "a", "tool_calls": [_call("{}")]}])


IN_PARTS = ROWS["in parts"]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_a_text_come_as_the_template_takes_them(name, door, role):
    source, want = IN_PARTS[name]
    parts = [{"type": "text", "text": text} for text in ("first", "second")]
    assert ChatTemplate(source).render(DOORS[door]([{"role": role, "content": parts}])) == want
    one = ChatTemplate(source).render(DOORS[door]([{"role": role, "content": "only"}]))
    assert one.strip('"<>') == "only"


def test_a_result_in_parts_is_one_text_where_the_template_takes_texts():
    parts = [{"type": "text", "text": text} for text in ("first", "second")]
    assert ChatTemplate(IN_PARTS["both"][0]).render([{"role": "tool", "content": parts}]) == "first\nsecond"


OTHERS = ROWS["others"]


@pytest.mark.parametrize("more", OTHERS)
def test_messages_of_other_servers_are_taken(more):
    read = messages_of("messages", [*TURNS, {"role": "assistant", "content": "yes", **more}])
    source = "{% for m in messages %}{{ m.content + '.' }}{{ m.reasoning_content or '' }}{% endfor %}"
    assert ChatTemplate(source).render(read).endswith(".hm" if more.get("content", "") is None else "yes.")
    with pytest.raises(ValueError, match="annotations"):
        messages_of("messages", [{"role": "assistant", "content": "yes", "annotations": [{"type": "url_citation"}]}])


@pytest.mark.parametrize("more", [{}, {"tool_calls": [_call("{}")]}])
def test_a_thought_has_both_names_but_beside_a_text_and_calls(more):
    source = "{% for m in messages %}{{ m.thinking }},{{ m.reasoning_content }}{% for c in m.tool_calls %}{% endfor %}"
    said = {"role": "assistant", "content": "a", "reasoning": "hm", **more}
    assert ChatTemplate(source + "{% endfor %}").render([said]) == (",hm" if more else "hm,hm")


@pytest.mark.parametrize("where", ["the configuration", "files"])
def test_chats_with_tools_take_the_template_for_them(where, tmp_path):
    using = "{{ tools | tojson }}" + CHATML
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": using}]
    path = folder(tmp_path, chat_template=named if where == "the configuration" else "unread")
    if where == "files":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(using)
    prompts = PromptEncoder(tokenizer=None, chat=ChatTemplate.load(path))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompts.render_chat(TURNS, tools=tools) == json.dumps(tools) + prompts.render_chat(TURNS, tools=[])
    assert prompts.chat.digest != ChatTemplate(CHATML).digest and "tool_use.jinja" in str(COMPANIONS)


FOLDER = Path(__file__).parent / "templates"
RECORDED = json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("name", NAMES)
def test_a_familys_template_gives_the_reference_text_or_refuses(name: str):
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), RECORDED["tokens"])
    assert set(RECORDED["texts"][name]) == set(RECORDED["conversations"])
    for conversation, expected in RECORDED["texts"][name].items():
        options = {"date_string": "2 Feb 2022", **RECORDED["conversations"][conversation]}
        messages = options.pop("messages")
        if expected is None:
            with pytest.raises(ValueError, match="the chat template refuses these messages"):
                template.render(messages, **options)
        else:
            assert template.render(messages, **options) == expected, conversation
