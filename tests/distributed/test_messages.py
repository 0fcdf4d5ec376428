"""What goes between processes: values come out as they went in, and nothing else comes out at all."""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.outputs import CompletionOutput, Logprob
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.lockstep import LeadingEngine
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.integrations.distributed import follow
from ferrum_jax.runtime.distributed import messages
from ferrum_jax.runtime.distributed.messages import Beat, Broken, Call, Digest, End, Failure, decode, encode, joined
from ferrum_jax.sampling_params import SamplingParams

RESUMED = CompletionOutput(
    index=1,
    text="so far \ud800",
    token_ids=(3, 4),
    cumulative_logprob=-0.1,
    logprobs=({3: Logprob(logprob=-0.1, rank=1, decoded_token="a"), 9: Logprob(logprob=-math.inf, rank=0)}, {}),
    finish_reason=None,
    stop_reason="end",
)
ADD = Call(
    "add",
    (
        [1, 2, 3],
        SamplingParams(logit_bias={5: -3.5}, stop=("a", "b"), seed=2**64 - 1, stop_token_ids=[4]),
        RequestOptions(
            media=(MediaSpan(kind="image", digest=b"\0\xff", start=0, length=2),), resume=[RESUMED], cache_salt="ü"
        ),
    ),
)
VALUES = [
    *(None, True, 3, -(2**70), 0.1, math.inf, "text", [], (), {}, [1, 2], (1, "a"), {"a": {1: 2.0}}, b"\0\1"),
    *(EngineConfig(mesh="dp=2,tp=4"), EngineConfig(speculative_config={"method": "suffix"})),
    *(Reach(num_rows=1, num_tokens=2), ADD, [ADD, Call("step", ())]),
    *(Digest(64, b"digest"), Failure("why", 2), End(3), Broken(5), Beat()),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_out_as_it_went_in(value):
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_an_image_goes_over_as_its_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 2), np.uint8)
    half = Normalising(scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
    image = ProcessedImage(pixels=pixels, normalising=half, temporal=2, grid=(1, 2, 2), num_tokens=1, digest=b"\0\xff")
    encoded = encode(RequestOptions(images=(image,)))
    assert len(encoded) < 1500
    (found,) = decode(encoded).images
    np.testing.assert_array_equal(found.patches, image.patches)
    assert found.digest == image.digest and found.grid == image.grid and found.normalising == half
    with pytest.raises(ValueError, match="a message cannot be read: 4 patches do not fill a grid"):
        decode(encoded.replace(b'{"tuple":[1,2,2]}', b'{"tuple":[1,2,3]}'))


def test_every_field_of_what_users_ask_for_goes_over():
    """A field that is added and cannot be sent would be found here."""
    for kind in (SamplingParams(), RequestOptions(), EngineConfig(), RESUMED):
        assert decode(encode(kind)) == dataclasses.replace(kind)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.arange(3, dtype=np.int32), [0, 1, 2]),
        (array("i", [1, 2]), [1, 2]),
        (range(3), [0, 1, 2]),
        ([np.int64(3), True], [3, True]),
        ({7}, [7]),
        (collections.OrderedDict(a=np.float32(0.5)), {"a": 0.5}),
    ],
    ids=repr,
)
def test_what_is_like_a_list_or_a_number_becomes_one(value, plain):
    assert decode(encode(value)) == plain


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, pathlib.Path("x"), np.array(["x"]), [{"a": 1j}]],
    ids=["object", "function", "path", "texts", "complex"],
)
def test_what_cannot_be_sent_is_refused_with_its_type(value):
    with pytest.raises(ValueError, match=r"(object|function|Path|ndarray|complex) cannot be sent"):
        encode(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (b"\x80\x04K\x01.", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"os.mkdir": ["x"]}', "'os.mkdir' is not a type"),
        (b'{"SamplingParams": {"n": 1}}', "SamplingParams has the fields"),
        (b'{"Digest": {"step": "1", "digest": {"bytes": ""}}}', "step is '1'; it must be int"),
        (b'{"Call": {"name": "close", "arguments": {"tuple": []}}}', "'close' is not a call"),
        (b'{"tuple": 3}', "cannot be read"),
        (b'{"dict": [[[], 1]]}', "cannot be read"),
        (b'{"bytes": "?"}', "cannot be read"),
        (b'{"a": 1, "b": 2}', "must have one key"),
    ],
)
def test_what_is_no_message_is_refused(content, says):
    with pytest.raises(ValueError, match=says):
        decode(content)


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*messages.CLASSES, "tuple", "dict", "bytes", "x"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_comes_is_a_value_or_a_value_error(content):
    try:
        found = decode(content)
    except ValueError:
        return
    encode(found)


def test_calls_are_sent_in_no_more_messages_than_their_lengths_ask_for(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 20)
    parts = [encode(value) for value in ("12345", "12345", "12345", 1, "1234567890123456")]
    found = joined(parts)
    assert all(len(message) <= 20 for message in found) and len(found) == 3
    assert [value for message in found for value in decode(message)] == ["12345"] * 3 + [1, "1234567890123456"]
    with pytest.raises(ValueError, match="at most 20; shorten the prompt"):
        encode("x" * 19)


def test_each_call_that_process_0_makes_is_one_that_the_others_make():
    """A call that is added to the leading engine must be added to those that may be sent."""

    class Sent(list):
        send_all = list.extend

    class Leads(LeadingEngine):
        def __init__(self):
            self._calls, self._processes = [], Sent()

    arguments = {"add": ([1], SamplingParams()), "abort": (0,), "queue_ready": (0,)}
    arguments |= {"learn": ([1], 0), "take_costs": ([(1, 1.0, [(1, 1.0)])],)}

    def made(name):
        engine = Leads()
        with contextlib.suppress(AttributeError):  # there is no engine below it
            getattr(engine, name)(*arguments.get(name, ()))
        return [decode(call) for call in (*engine._calls, *engine._processes)]

    own = {name for name in vars(LeadingEngine) if not name.startswith("_")}
    assert own == set(messages.CALLS)
    assert all(made(name)[0].name == name for name in own - {"step", "drain"})


def test_a_call_that_cannot_be_sent_is_refused_before_any_engine_makes_it():
    class Sent:
        def send_all(self, encoded):
            assert decode(joined(encoded)[0]) == [Call("abort", (3,)), Call("step", ())]

    engine = LeadingEngine.__new__(LeadingEngine)
    engine._calls, engine._processes = [], Sent()
    with pytest.raises(ValueError, match="complex cannot be sent"):
        engine.add([1j], SamplingParams())
    engine._calls.append(encode(Call("abort", (3,))))
    engine._send("step")


def test_a_process_that_follows_makes_the_calls():
    made = []

    class Engine:
        def add(self, *arguments):
            made.append(("add", arguments))

        def step(self):
            made.append("step")

    class Calls:
        engine = Engine()

        def whole(self, call):
            call()

    follow(Calls(), decode(encode([ADD, Call("step", ())])))
    assert made == [("add", ADD.arguments), "step"]


def test_a_sound_goes_over_as_its_features():
    features = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    clip = ProcessedClip(features=features, grid=(1, 6, 1), num_frames=5, num_tokens=3, seconds=0.5, digest=b"\0\xff")
    (found,) = decode(encode(RequestOptions(images=(clip,)))).images
    np.testing.assert_array_equal(found.patches, clip.patches)
    assert found.patches.dtype == np.float32 and (found.digest, found.grid) == (clip.digest, clip.grid)
