"""Text to ids and back by the checkpoint's own rules."""

import json

import pytest
import tokenizers

from ferrum_jax.text import Tokenizer, require_tokenizer
from tests.text.samples import KINDS, folder, tokenizer

BOS, EOS = 1, 2


def test_a_pattern_that_does_not_end_on_a_text_is_an_error_of_that_text(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "!": 1}, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    library.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer.load(tmp_path)
    assert own.encode("a") == [0]
    with pytest.raises(ValueError, match=r"the tokenizer gives up on 'aaa.*a pattern that does not end on this text"):
        own.encode("a" * 40 + "!")


def test_a_bos_that_the_post_processor_adds_is_there_once(tmp_path):
    for wish in ({}, {"add_bos_token": True}):
        own = Tokenizer.load(folder(tmp_path, "sentencepiece", **wish))
        assert own.encode("the end").count(BOS) == 1
        assert own.encode("<s>the end").count(BOS) == 1
    assert BOS not in own.encode("the end", add_special_tokens=False)


def test_add_bos_token_and_add_eos_token_overrule_the_post_processor(tmp_path):
    without = Tokenizer.load(folder(tmp_path, "sentencepiece", add_bos_token=False))
    assert BOS not in without.encode("the end")
    assert without.encode("<s>the end").count(BOS) == 1
    added = Tokenizer.load(folder(tmp_path, "byte_level", add_bos_token=True, add_eos_token=True))
    plain = Tokenizer.load(folder(tmp_path, "byte_level")).encode("the end")
    assert added.encode("the end") == [BOS, *plain, EOS]
    assert added.encode("<s>the end") == [BOS, *plain, EOS]
    assert added.encode("") == [BOS, EOS]
    assert added.encode("the end", add_special_tokens=False) == plain


def test_special_tokens_are_named_by_either_file_and_known_by_id(tmp_path):
    path = folder(tmp_path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": None}))
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "<unk>"}))
    own = Tokenizer.load(path)
    assert own.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert own.vocab_size == 332 and own.token(331) == "<tool>" and own.token(332) is None


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_shown_only_on_request(kind):
    own = tokenizer(kind)
    ids = [BOS, *own.encode("the end", add_special_tokens=False), EOS, 5000]
    assert own.decode(ids) == "the end"
    assert own.decode(ids, skip_special_tokens=False).replace(" ", "") == "<s>theend</s>"


def test_text_after_a_prompt_keeps_the_space_between_them():
    own = tokenizer("sentencepiece")
    prompt, rest = own.encode("the end"), own.encode(" of", add_special_tokens=False)[1:]
    assert own.decode(rest) == "of"
    assert own.decode(rest, after=prompt) == " of"
    assert own.decode([*prompt, *rest]) == "the end of"


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    path = folder(tmp_path) / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(saved))
    assert len(Tokenizer.load(tmp_path).encode("the end of the line")) > 2


def test_a_tokenizer_may_be_named_by_its_file(tmp_path):
    own = Tokenizer.load(folder(tmp_path) / "tokenizer.json")
    assert own.decode([EOS], skip_special_tokens=False) == "</s>"


def test_a_folder_without_a_tokenizer_has_none_and_the_error_says_what_to_do(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    with pytest.raises(ValueError, match="prompts must be lists of token ids, or give tokenizer="):
        require_tokenizer(None, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (folder(tmp_path) / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"eos_token": {"lstrip": False}}, "eos_token .*; it must be text, or an object with its content"),
        ({"eos_token": ["</s>"]}, "eos_token .*; it must be text, or an object with its content"),
        ({"add_bos_token": "yes"}, "add_bos_token 'yes'; it must be true or false"),
        ({"add_bos_token": True, "bos_token": "<no>"}, "add_bos_token true and bos_token '<no>', which is not a token"),
    ],
)
def test_a_configuration_that_names_no_token_is_refused(tmp_path, said, message):
    (folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"tokenizer_config.json has {message}"):
        Tokenizer.load(tmp_path)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(ValueError, match="lone surrogates"):
        tokenizer("byte_level").encode("a\ud800")


def added(text: str, **flags: bool) -> dict[str, object]:
    return {
        "content": text,
        **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False),
        **flags,
    }


def test_tokens_of_the_configuration_alone_are_one_token_each(tmp_path):
    plain = Tokenizer.load(folder(tmp_path))
    first, end = plain.vocab_size, plain.encode("d")[-1]
    named = {
        f"{first + 1}": added("<mark>", rstrip=True),
        f"{first}": added("<|turn|>"),
        f"{end}": added("d", special=True),
    }
    own = Tokenizer.load(folder(tmp_path, added_tokens_decoder=named, pad_token="<|turn|>"))
    assert own.encode("<|turn|>a<mark>  end") == [first, *plain.encode("a"), first + 1, *plain.encode("en"), end]
    assert own.decode([first, first + 1, end]) == "<mark>", "a token with a role is special"
    assert own.decode([first, end], skip_special_tokens=False) == "<|turn|>d"
    assert own.digest != plain.digest and f"{first}" in own.to_json()
    same = {str(i): added(text, special=True) for text, i in plain.special_texts().items()}
    assert Tokenizer.load(folder(tmp_path, added_tokens_decoder=same)).digest == plain.digest


def test_an_older_folder_has_added_tokens_in_a_file_of_their_own(tmp_path):
    path, first = folder(tmp_path), tokenizer("byte_level").vocab_size
    (path / "added_tokens.json").write_text(json.dumps({"<|turn|>": first}))
    assert Tokenizer.load(path).encode("<|turn|>") == [first]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"9000": added("<|turn|>")}, r"has '<\|turn\|>' at 9000 of added_tokens_decoder, and behind .* its id"),
        ({"x": added("<|turn|>")}, "in added_tokens_decoder; it must be an object that has, for each id"),
        ({"332": {"content": ""}}, "in added_tokens_decoder; it must be"),
        ({"332": {"content": "a", "special": 1}}, "in added_tokens_decoder; it must be"),
        ([added("<|turn|>")], "in added_tokens_decoder; it must be"),
    ],
)
def test_an_added_token_without_its_place_is_refused(tmp_path, named, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(folder(tmp_path, added_tokens_decoder=named))
