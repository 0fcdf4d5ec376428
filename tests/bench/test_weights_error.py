"""What forms of weights cost is measured against the model's own float32, on a text."""

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.bench import weights_error
from tests.support import GOLDENS, small_llm

pytestmark = pytest.mark.slow


def test_more_bits_are_nearer_to_float32_and_every_form_says_its_size():
    found = weights_error.measure_weights_error(small_llm("qwen3"), "One line. Another line, 2 of them.")
    lines = {line["form"]: line for line in found["forms"]}
    assert list(lines) == list(weights_error.MADE) and found["text_bytes"] == 34 and found["bits_per_byte"] > 0
    assert "inputs are no multiple of 128" in lines["int4-g128"]["refused"]
    assert 0 < lines["int8-a16"]["kl_nats"] < lines["int8"]["kl_nats"] < lines["mxfp4"]["kl_nats"]
    assert lines["int8-a16"]["kl_nats"] < lines["fp8-a16"]["kl_nats"] < lines["int4-g32"]["kl_nats"]
    assert lines["int8"]["same_top_token"] > 0.9
    # a scale of four bytes for each output of 64 inputs and more; of two bytes, or one, for each 32 inputs
    assert 0.25 < lines["int8"]["of_float32_bytes"] < 0.27
    assert lines["int4-g32"]["of_float32_bytes"] == pytest.approx((0.5 + 2 / 32) / 4, abs=1e-4)
    assert lines["mxfp4"]["of_float32_bytes"] == pytest.approx((0.5 + 1 / 32) / 4, abs=1e-4)


def test_quantised_weights_and_a_text_for_another_workload_are_refused(capsys):
    with pytest.raises(ValueError, match="quantised already"):
        weights_error.measure_weights_error(small_llm("quantised/w8a8_experts"))
    command = ["bench", "--model", str(GOLDENS / "qwen3"), "--workload", "decode", "--text", "a"]
    assert main(command) == 2
    assert "--text is for --workload weights_error" in capsys.readouterr().err
