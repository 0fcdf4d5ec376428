"""The README is short, and its examples run as they stand there: the demo model answers them as it says."""

import json
import re
import shlex
import time

import pytest
from rich.console import Console

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.__main__ import main
from ferrum_jax.batch.report.display import Tally, summary_table
from tests.support import COMPILED, ROOT

README = (ROOT / "README.md").read_text()
DEMO = (ROOT / "scripts/demo").read_text()
AGAIN_AND_AGAIN = r"\b(\w+)(\W+\1\b){2}"
SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]  # few executables


def test_it_is_read_in_three_minutes():
    assert len(README.split()) < 700


def test_its_picture_and_its_links_are_there():
    for path in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_table_that_it_shows_of_the_demo_is_that_of_a_job(capsys):
    tally = Tally(
        num_rows=48,
        num_ok=48,
        num_prompt_tokens=10144,
        num_hit_tokens=8256,
        num_output_tokens=3343,
        started_s=time.monotonic() - 6.3,
    )
    Console(width=80).print(summary_table(tally, "out"))
    said = capsys.readouterr().out
    (shown,) = re.findall(r"(?s)```text\n(┌.*?)\.\.\.", README)
    assert shown in re.sub(r"(?m)^ +", "", said)


@pytest.mark.slow
def test_the_completion_that_it_shows_of_the_demo_is_the_model_s(monkeypatch):
    """This is a row of scripts/demo, and those have seeds of their own."""
    (name,) = re.findall(r"╭─ (\S+) ─+╮", README)
    assert f'("{name}",' in DEMO
    monkeypatch.chdir(ROOT)
    rows = map(json.loads, (ROOT / "scripts/demo_prompts.jsonl").read_text().splitlines())
    row = next(row for row in rows if row.pop("custom_id") == name)
    prompt = row.pop("prompt")
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, compilation_cache_dir=str(COMPILED)
    )
    (output,) = LLM("checkpoints/demo", config).generate(prompt, SamplingParams.from_dict(row))
    shown = [line.rstrip() for line in re.findall(r"(?m)^│ (.*) │$", README[README.index("╭─") :])]
    made = "".join(prompt.splitlines(keepends=True)[-2:]) + output.text
    assert shown == made.splitlines()[: len(shown)]


@pytest.mark.slow
def test_the_command_that_generates_gives_code(capsys, monkeypatch):
    (line,) = re.findall(r"(?m)^ {4}(ferrum-jax generate .*)$", README)
    monkeypatch.chdir(ROOT)
    assert main([*shlex.split(line)[1:], *SMALL, "--compilation-cache-dir", str(COMPILED)]) == 0
    said = capsys.readouterr().out
    assert "return NotImplemented\n        return self.__class__(other) == other.__class__(other)\n" in said
    assert re.findall(r"(?s)```text\n( {8}.*?)```", README)[0] in said
    assert not re.search(AGAIN_AND_AGAIN, said)


def test_the_first_lines_of_python_are_those_of_the_documentation():
    page = (ROOT / "docs/start/first-python.md").read_text()
    assert re.findall(r"(?s)```python\n(.*?)```", page) == re.findall(r"(?s)```python\n(.*?)```", README)


@pytest.mark.slow
def test_the_example_in_python_gives_code(capsys, monkeypatch):
    (code,) = re.findall(r"(?s)```python\n(.*?)```", README)
    monkeypatch.chdir(ROOT)
    own = "EngineConfig(max_num_seqs=16"
    assert code.count(own) == 1
    small = "max_num_batched_tokens=64, max_model_len=256"
    exec(code.replace(own, f"{own}, {small}, compilation_cache_dir={str(COMPILED)!r}"), {})
    said = capsys.readouterr().out
    assert "        return self\n\n     (" in said and "        self.close()\n        return self\n\n     (" in said
    assert "            return NotImplemented\n        return self.__eq__(other) == other.__eq__(other)\n" in said
