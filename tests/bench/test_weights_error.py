"""What forms of weights cost is measured against the model's own float32, on a text."""

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.cli.benchmarks import weights_error
from tests.support import GOLDENS, small_llm

pytestmark = pytest.mark.slow


def test_more_bits_are_nearer_to_float32_and_every_form_says_its_size():
    found = weights_error.measure_weights_error(small_llm("qwen3"), "One line. Another line, 2 of them.")
    lines = {line["form"]: line for line in found["forms"]}
    assert list(lines) == list(weights_error.MADE) and found["text_bytes"] == 34 and found["bits_per_byte"] > 0
    assert "inputs are no multiple of 128" in lines["int4-g128"]["refused"]
    assert all("88 inputs are no multiple of 32" in lines[form]["refused"] for form in ("int4-g32", "mxfp4"))
    assert 0 < lines["int8-a16"]["kl_nats"] < lines["int8"]["kl_nats"] < lines["fp8"]["kl_nats"]
    assert lines["int8-a16"]["kl_nats"] < lines["fp8-a16"]["kl_nats"] < lines["fp8"]["kl_nats"]
    # a scale of four bytes for each output of 64 inputs and more
    assert all(0.25 < lines[form]["of_float32_bytes"] < 0.27 for form in ("int8", "fp8"))


def test_quantised_weights_and_a_text_for_another_workload_are_refused(capsys):
    with pytest.raises(ValueError, match="quantised already"):
        weights_error.measure_weights_error(small_llm("quantised/w8a8_experts"))
    command = ["bench", "--model", str(GOLDENS / "qwen3"), "--workload", "decode", "--text", "a"]
    assert main(command) == 2
    assert "--text is for --workload weights_error" in capsys.readouterr().err
