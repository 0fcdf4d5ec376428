"""Items of a response's input as the messages of a chat."""

import pytest

from ferrum_jax.openai.contents import messages_of
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.bodies.response_input import input_messages

URL = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    ("more", "detail"), [({}, {}), ({"detail": "auto"}, {"detail": "auto"}), ({"detail": None}, {})]
)
def test_images_and_texts_are_parts_of_a_message(more, detail):
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL, **more}]
    (message,) = input_messages([{"role": "user", "content": parts}])
    seen = {"type": "image_url", "image_url": {"url": URL, **detail}}
    assert message == {"role": "user", "content": [{"type": "text", "text": "What?"}, seen]}
    assert messages_of("input", [message])[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}


def test_sounds_are_parts_and_files_by_their_id_are_refused():
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    assert input_messages([{"role": "user", "content": [sound]}])[0]["content"] == [sound]
    with pytest.raises(FieldError, match="input_image with its URL"):
        input_messages([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}])
