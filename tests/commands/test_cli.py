"""The ferrum-jax command: flags reach the engine under their names, and mistakes are one clear line and exit code 2."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import ClassVar

import pytest

from ferrum_jax import __main__ as cli
from ferrum_jax.batch.journal.journal_file import object_in
from ferrum_jax.cli import flags
from ferrum_jax.cli.model import runs_on_cpu
from ferrum_jax.cli.model_names import model_names
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.accelerators import Chips
from ferrum_jax.engine.startup.choose_attention import AttentionChoice
from ferrum_jax.engine.startup.choose_products import ProductChoice
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig
from ferrum_jax.runtime.pools.budget import GroupBlocks, Ledger
from ferrum_jax.sampling_params import SamplingParams
from tests.batch.fake_llm import FakeLLM, answer
from tests.forked import run
from tests.rows import rows_beside
from tests.support import GOLDENS, ROOT, raising


class CommandLLM(FakeLLM):
    """Stands in for ferrum_jax.LLM and remembers how it was made and asked."""

    made: "list[CommandLLM]"
    startup_s = 0.5
    bundled = None
    attention = AttentionChoice(implementation=None)
    products = ProductChoice(implementation="xla")
    choices: tuple[str, ...] = ()
    host_memory_kind = None
    refused_products: ClassVar[dict[str, str]] = {}
    blocks = GroupBlocks(num_blocks=9, block_bytes=1000)
    ledger = Ledger(weights_bytes=1, slots_bytes=1, prompts_bytes=1, groups=(blocks,), block_size=16)

    def __init__(self, model, config, *, tokenizer, reach, on_progress, on_identity, **others):
        super().__init__()
        assert others.keys() == {"revision", "bundle", "require_bundle", "on_problem", "begun_with"}
        assert (others["revision"], others["bundle"], others["require_bundle"]) == (None, None, False)
        if "missing" in model:
            raise ValueError(f"{model} has no config.json")
        on_progress("compiling", 1, 2)
        config = dataclasses.replace(config, max_num_seqs=config.rows_on("cpu"))
        self.model, self.config, self.tokenizer, self.reach = model, config, tokenizer, reach
        self.asked: list = []
        on_identity(self.identity)
        CommandLLM.made.append(self)

    def generate(self, prompts, params):
        self.asked.append((prompts, params))
        return [answer(prompt, params) for prompt in prompts]

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        whole = answer(prompt, params)
        for end in (2, len(whole.text)):
            choice = dataclasses.replace(whole.outputs[0], text=whole.text[:end])
            yield dataclasses.replace(whole, outputs=(choice,))

    def stats(self):
        return {**super().stats(), "hits": 3, "entries": 7}

    def cache_prefix(self, prompt):
        self.asked.append(prompt)

    def save_prefix_cache(self, path, prompts):
        self.asked.append((path, prompts))
        return 7

    def load_prefix_cache(self, path):
        self.asked.append(path)
        return 5


@pytest.fixture
def llms(monkeypatch):
    """The LLMs that commands make, with a stand-in for jax that says it runs on the CPU."""
    CommandLLM.made = []
    traces: list[str] = []

    @contextlib.contextmanager
    def trace(folder):
        traces.append(folder)
        yield

    jax = types.SimpleNamespace(
        config=types.SimpleNamespace(values={"jax_platforms": "cpu"}),
        profiler=types.SimpleNamespace(trace=trace),
        traces=traces,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "ferrum_jax.llm", types.SimpleNamespace(LLM=CommandLLM))
    return CommandLLM.made


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_prompt_is_streamed_as_plain_text(llms, capsys):
    assert cli.main(["generate", "--model", "m", "--max-tokens", "6", "def f"]) == 0
    prompt, params = llms[0].asked[0]
    assert (prompt, params) == ("def f", SamplingParams(max_tokens=6))
    assert capsys.readouterr().out == answer(prompt, params).text + "\n"


def test_kv_heads_that_several_devices_repeat_are_said_with_their_bytes(llms, capsys, monkeypatch):
    groups = tuple(dataclasses.replace(group, head_copies=4) for group in CommandLLM.ledger.groups)
    monkeypatch.setattr(CommandLLM, "ledger", dataclasses.replace(CommandLLM.ledger, groups=groups))
    assert cli.main(["generate", "--model", "m", "--mesh", "tp=8", "x"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "tp=8 is more devices than KV heads: each head is on 4 of them" in said
    assert "7,500 of 10,000 KV bytes of a device are repeated" in said


def test_paths_ids_and_errors_are_shown_as_they_are_whatever_brackets_they_have(llms, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    odd = "[/INST][bold]:warning:"
    folder = tmp_path / "[" / "INST][bold]:warning:"  # a path in which that stands
    folder.mkdir(parents=True)
    rows = write_rows(
        folder / "in", {"custom_id": odd, "prompt": "x", "colour": odd}, {"custom_id": "b", "prompt": "x"}
    )
    assert cli.main(["batch", "--model", odd, "--input", str(rows), "--output", str(folder / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{odd} ready in" in error and "colour is not known" in error
    assert str(folder / "out") in "".join(error.split())  # the title of a narrow table
    (folder / "kept").mkdir()
    assert cli.main(["generate", "--model", odd, "--load-prefix-cache", str(folder / "kept"), odd]) == 0
    assert cli.main(["generate", "--model", f"missing {odd}", odd]) == 2
    assert f"error: missing {odd} has no config.json" in capsys.readouterr().err


def test_several_prompts_are_printed_one_after_the_other(llms, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("from a file")
    command = ["generate", "--model", "m", "a", "b", "--prompt-file", str(tmp_path / "p.txt"), "--token-ids", "1, 2 3"]
    assert cli.main(command) == 0
    assert llms[0].asked[0][0] == ["a", "b", "from a file", [1, 2, 3]]
    assert "--- prompt 3, choice 0 (length) ---" in capsys.readouterr().out


def test_json_has_an_object_for_each_prompt_with_logprobs(llms, capsys):
    assert cli.main(["generate", "--model", "m", "a", "b", "--json", "--logprobs", "0", "--n", "2", "--stats"]) == 0
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["prompt"] for line in found] == ["a", "b"] and len(found[0]["outputs"]) == 2
    assert found[0]["outputs"][0]["logprobs"][0]
    assert json.loads(captured.err.splitlines()[-1])["hits"] == 3


def test_chat_makes_messages(llms):
    assert cli.main(["generate", "--model", "m", "--chat", "--system", "be brief", "hi"]) == 0
    assert llms[0].asked[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_prompts_take_options_of_the_template_and_the_tokenizer(llms, capsys):
    command = ["generate", "--model", "m", "--no-add-special-tokens", "hi"]
    assert cli.main(command) == 0
    assert llms[0].asked[0][0] == {"prompt": "hi", "add_special_tokens": False}
    kwargs = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert cli.main([*command, "--chat", *kwargs]) == 0
    assert llms[1].asked[0][0] == {
        "messages": [{"role": "user", "content": "hi"}],
        "add_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert cli.main([*command, *kwargs]) == 2
    assert "--chat-template-kwargs needs --chat" in capsys.readouterr().err
    assert cli.main([*command, "--no-detokenize"]) == 2
    assert "printed as JSON only; add --json" in capsys.readouterr().err


def test_prefixes_are_computed_saved_checked_and_loaded(llms, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cache", "save", "kept", "--model", "m", "--prompt", "be brief", "--token-ids", "1 2"]) == 0
    assert llms[0].asked == ["be brief", [1, 2], (Path("kept"), ["be brief", [1, 2]])]
    assert llms[0].config.invariant, "on the CPU a batch job, which is invariant by default, can load them"
    assert cli.main(["cache", "load", "kept", "--model", "m"]) == 0
    assert llms[1].asked == [Path("kept")]
    out = capsys.readouterr().out
    assert "kept: 7 blocks of 16 tokens" in out and "kept: 5 blocks of 16 tokens, undamaged" in out
    Path("kept").mkdir()
    assert cli.main(["generate", "--model", "m", "--load-prefix-cache", "kept", "hi", "ho"]) == 0
    assert llms[2].asked[0] == Path("kept") and llms[2].asked[1][0] == ["hi", "ho"]


@pytest.mark.parametrize(
    ("command", "rows", "tokens"),
    [
        ("generate abc ab --n 3 --max-tokens 5", 6, 3 * (3 + 2 + 2 * 5)),
        ("cache save kept --prompt abc --token-ids 1,2", 2, 3 + 2 + 2 * 1),
        ("cache load kept", 1, 1),
    ],
)
def test_a_command_that_knows_its_prompts_compiles_for_no_more_than_these(llms, command, rows, tokens):
    assert cli.main([*command.split(), "--model", "m"]) == 0

    def token_ids(content, kept):
        return content

    token_ids.generation = {}
    reach = llms[0].reach(token_ids, 100)
    assert reach == Reach(num_rows=rows, num_tokens=tokens, request_tokens=None)


def test_every_engine_flag_reaches_the_config(llms):
    command = """generate --model m p --tokenizer t --dtype float32 --kv-dtype int8 --block-size 32 --max-model-len 100
        --max-num-seqs 3 --max-num-batched-tokens 64 --kv-memory-bytes 1000 --num-blocks 9 --no-prefix-caching
        --invariant --implementation xla --attention-tiles items=2 --mesh tp=1 --seed 5 --compilation-cache-dir c
        --speculative-config {"method":"ngram","prompt_lookup_max":3}"""
    assert cli.main(command.split()) == 0
    wanted = {"dtype": "float32", "kv_dtype": "int8", "block_size": 32, "max_model_len": 100, "max_num_seqs": 3}
    wanted |= {"max_num_batched_tokens": 64, "kv_memory_bytes": 1000, "num_blocks": 9, "enable_prefix_caching": False}
    wanted |= {"invariant": True, "implementation": "xla", "attention_tiles": "items=2", "mesh": "tp=1", "seed": 5}
    wanted |= {"compilation_cache_dir": "c", "speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}
    assert llms[0].config == EngineConfig(**wanted)
    assert llms[0].tokenizer == "t"


def test_every_sampling_flag_reaches_the_parameters(llms):
    command = """generate --model m p --json --n 2 --max-tokens 9 --min-tokens 1 --temperature 0.5 --top-k 3 --top-p 0.9
        --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 17=-3
        --stop x --stop y --stop-token-id 1 --include-stop-str-in-output --no-skip-special-tokens --ignore-eos
        --logprobs 2 --prompt-logprobs 1 --truncate-prompt-tokens -1 --echo --logit-bias 18=-inf
        --no-speculative"""
    assert cli.main(command.split()) == 0
    wanted = {"n": 2, "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    wanted |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    wanted |= {"logit_bias": {17: -3.0, 18: -math.inf}, "stop": ["x", "y"], "stop_token_ids": [1]}
    wanted |= {"include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True, "logprobs": 2}
    wanted |= {"prompt_logprobs": 1, "truncate_prompt_tokens": -1, "echo": True, "speculative": False}
    assert llms[0].asked[0][1] == SamplingParams(**wanted)


def test_a_form_that_the_text_is_held_to_is_named_as_json(llms, capsys):
    assert cli.main(["generate", "--model", "m", "p", "--json", "--structured-outputs", '{"choice": ["x", "y"]}']) == 0
    assert llms[0].asked[0][1].structured_outputs == StructuredOutputsParams(choice=["x", "y"])
    for text, problem in (("x", "'x' is not JSON"), ("[]", "'[]' is not a JSON object")):
        with pytest.raises(SystemExit):
            cli.main(["generate", "--model", "m", "p", "--structured-outputs", text])
        assert problem in capsys.readouterr().err
    assert cli.main(["generate", "--model", "m", "p", "--structured-outputs", '{"jso": {}}']) == 2
    assert "structured_outputs has unknown keys ['jso']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ngram", "speculative_config is 'ngram'; it must be JSON"),
        ('{"method":"eagle3"}', "no second model drafts here"),
    ],
)
def test_a_way_to_draft_that_is_not_here_is_refused_before_a_model_loads(text, problem, llms, capsys):
    assert cli.main(["generate", "--model", "m", "p", "--speculative-config", text]) == 2
    assert problem in capsys.readouterr().err and not llms


def test_every_field_of_both_has_a_flag():
    parser = argparse.ArgumentParser()
    flags.add_engine_flags(parser)
    flags.add_sampling_flags(parser)
    known = {action.dest for action in parser._actions} | {
        "return_routed_experts",
        "return_sampling_mask",
        "transcript",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "max_new_tokens",
    }  # for callers in Python
    for kind in (EngineConfig, SamplingParams):
        assert {field.name for field in dataclasses.fields(kind)} <= known


def test_batch_answers_a_file_and_is_invariant_on_the_cpu(llms, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    out = tmp_path / "out.jsonl"
    command = ["batch", "--model", "models/tiny/", "--input", str(rows), "--output", str(out), "--profile", "traces"]
    assert cli.main(command) == 0
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert {line["custom_id"]: line["response"]["body"]["model"] for line in lines} == {"a": "tiny", "b": "tiny"}
    assert llms[0].config.invariant and sys.modules["jax"].traces == ["traces"]


def test_batch_has_defaults_for_its_rows(llms, tmp_path, capsys):
    rows = write_rows(
        tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y", "max_tokens": 2}
    )
    command = ["batch", "--model", "m", "--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
    flags = ["--max-tokens", "5", "--stop", "q", "--logit-bias", "17=-3", "--logprobs", "1", "--ignore-eos"]
    assert cli.main([*command, *flags]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in lines] == [5, 2]
    assert lines[0]["response"]["body"]["choices"][0]["logprobs"]
    record = object_in((tmp_path / "out.jsonl.journal" / "job.json").read_bytes())
    given = {"max_tokens": 5, "stop": ["q"], "logit_bias": {"17": -3.0}, "logprobs": 1, "ignore_eos": True}
    assert record["settings"]["defaults"] == given
    capsys.readouterr()
    assert cli.main([*command, "--top-p", "3"]) == 2
    assert "top_p is 3.0" in capsys.readouterr().err


def test_a_batch_may_go_on_with_another_way_to_draft(llms, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x"})
    command = ["batch", "--model", "m", "--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*command, "--speculative-config", '{"method": "ngram"}', "--no-speculative"]) == 0
    assert llms[0].config.speculative_config == SpeculativeConfig(method="ngram")
    before = (tmp_path / "out.jsonl").read_bytes()
    write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    assert cli.main([*command, "--speculative-config", '{"method": "suffix"}']) == 0
    assert llms[1].config.speculative_config == SpeculativeConfig(method="suffix")
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)


@pytest.mark.parametrize("asked", ["served", "too", "models/tiny/", "models/tiny", "tiny", None])
def test_a_row_may_ask_for_the_model_by_its_path_its_base_name_or_a_name_given_to_it(llms, tmp_path, asked):
    out = str(tmp_path / "out.jsonl")
    rows = write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x", "model": asked})
    names = ["--served-model-name", "served", "--served-model-name", "too"]
    assert cli.main(["batch", "--model", "models/tiny/", "--input", str(rows), "--output", out, *names]) == 0
    assert json.loads(Path(out).read_bytes())["response"]["body"]["model"] == "served"


def test_a_job_whose_rows_all_ask_for_another_model_names_both_and_loads_none(llms, capsys, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x", "model": "gpt"})
    assert cli.main(["batch", "--model", "models/tiny/", "--input", str(rows), "--output", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert (
        "every row asks for another model: 'gpt' (1 rows); this one is 'tiny', 'models/tiny/', 'models/tiny'" in error
    )
    assert llms == []


def test_a_model_in_a_hubs_cache_has_the_hubs_name():
    cache = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12"
    assert model_names(cache, [])[0] == "Qwen/Qwen3-0.6B"
    assert model_names("/models/Qwen/Qwen3-0.6B", [])[:3:2] == ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert model_names("gs://B/demo/", ["a"])[:2] == ("a", "demo")
    assert model_names("Qwen/Qwen3-0.6B", ["a"]) == ("a", "Qwen/Qwen3-0.6B", "Qwen3-0.6B")


@pytest.mark.parametrize(
    ("flag", "platforms"), [("--no-invariant", "cpu"), ("--dtype=bfloat16", "cpu"), ("--seed=1", "cuda,cpu")]
)
def test_batch_is_not_invariant_where_that_is_not_wanted_or_not_possible(llms, tmp_path, flag, platforms):
    sys.modules["jax"].config.values["jax_platforms"] = platforms
    rows = write_rows(tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "x"})
    assert cli.main(["batch", "--model", "m", "--input", str(rows), "--output", str(tmp_path / "o"), flag]) == 0
    assert not llms[0].config.invariant


@pytest.mark.parametrize("module", ["argparse", "ferrum_jax.cli.batch", "ferrum_jax.core.outputs"])
def test_ctrl_c_while_the_command_is_imported_is_one_line(module):
    hook = f"""
        import sys
        sys.modules.pop({module!r}, None)
        class Interrupts:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupts())
        from ferrum_jax.__main__ import command
        command()"""
    program = [sys.executable, "-c", textwrap.dedent(hook), "--help"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "ferrum-jax: interrupted\n")


def test_a_command_whose_output_was_closed_at_its_start_runs():
    program = f"exec {sys.executable} -m ferrum_jax --help <&- >&-"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_batch_exits_1_when_a_row_failed_and_130_when_it_was_interrupted(llms, tmp_path, monkeypatch):
    good = {"custom_id": "a", "prompt": "x"}
    rows = write_rows(tmp_path / "in.jsonl", good, {"custom_id": "b", "prompt": "y", "colour": 1})
    out = str(tmp_path / "out.jsonl")
    assert cli.main(["batch", "--model", "m", "--input", str(rows), "--output", out]) == 1
    interrupted = raising(KeyboardInterrupt)
    monkeypatch.setattr(CommandLLM, "run", interrupted)
    assert cli.main(["batch", "--model", "m", "--input", str(rows), "--output", out + "2"]) == 130
    monkeypatch.setattr(CommandLLM, "stream", interrupted)
    assert cli.main(["generate", "--model", "m", "p"]) == 130


@pytest.mark.parametrize(
    ("command", "message"), rows_beside(__file__)["wrong input is one line on stderr and exit code 2"]
)
def test_wrong_input_is_one_line_on_stderr_and_exit_code_2(llms, capsys, tmp_path, command, message):
    write_rows(tmp_path / "in", {"custom_id": "a", "prompt": "x"})
    (tmp_path / "linked").hardlink_to(tmp_path / "in")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = f"--model m --input {tmp_path}/in --output {tmp_path}/o"
    assert cli.main(command.format(tmp=tmp_path, io=given).split()) == 2
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    error = capsys.readouterr().err.strip()
    assert message.format(tmp=tmp_path) in error and "\n" not in error and llms == []
    assert error.startswith(f"ferrum-jax {command.split()[0]}: error: ")


@pytest.mark.parametrize(
    "command",
    [
        *("", "nonsense", "generate p", "batch --model m"),
        *("generate --model m p --max-tok 3", "generate --model m p --logit-bias 3"),
    ],
)
def test_wrong_usage_is_exit_code_2(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.split())
    assert stopped.value.code == 2 and "error: " in capsys.readouterr().err


def test_an_unknown_flag_is_refused_with_the_one_that_may_be_meant(capsys):
    with pytest.raises(SystemExit):
        cli.main(["cache", "save", "out", "--model", "m", "--promt", "p"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ferrum-jax cache save DIR --model DIR")
    assert error == "ferrum-jax cache save: error: unrecognized arguments: --promt p; did you mean --prompt?"


def test_what_was_chosen_where_the_flags_leave_it_open_is_said_in_a_line_each(llms, capsys, monkeypatch):
    monkeypatch.setattr(CommandLLM, "choices", ("mesh tp=8 is taken of 8 devices", "64 rows run at once"))
    assert cli.main(["generate", "--model", "m", "p"]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == list(CommandLLM.choices)


@pytest.mark.parametrize(
    ("platforms", "chips", "package", "is_cpu"),
    [
        *(("cpu", "tpu", True, True), ("cpu,cuda", "gpu", True, True), ("cuda,cpu", "gpu", True, False)),
        *(("", "gpu", True, False), (None, "tpu", True, False), (None, "tpu", False, True), (None, "", True, True)),
    ],
)
def test_the_platform_is_told_without_opening_a_device(llms, monkeypatch, platforms, chips, package, is_cpu):
    """The stand-in for jax has no devices to ask for: on several hosts the first look at them waits for all."""
    sys.modules["jax"].config.values["jax_platforms"] = platforms
    monkeypatch.setattr(Chips, "here", lambda: Chips(platform=chips, ids=()))
    monkeypatch.setattr(Chips, "has_package", lambda self: package)
    assert runs_on_cpu() is is_cpu


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_a_job_has_many_rows_on_the_cpu_and_elsewhere_as_many_as_there_is_room_for(monkeypatch, where):
    """Named rows are never fewer than asked for, so that they stay open where a kernel may have no room for all."""
    from ferrum_jax.cli import model

    monkeypatch.setattr(model, "runs_on_cpu", lambda: where == "cpu")
    assert model.job_config(argparse.Namespace(bundle=None)).max_num_seqs == (256 if where == "cpu" else None)
    assert model.job_config(argparse.Namespace(bundle=None, max_num_seqs=7)).max_num_seqs == 7


@pytest.mark.parametrize("flags", [[], ["--json"]])  # streamed; and written when the command ends
def test_output_that_nobody_reads_any_more_ends_the_command_in_silence(llms, capsys, monkeypatch, flags):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["generate", "--model", "m", "p", *flags]) == 141
        print("what comes after it is dropped", flush=True)
    assert capsys.readouterr().err == "m ready in 0.5 s: 16 rows at once, KV pool of 144 tokens (0.0 MiB a device)\n"


def test_a_schema_that_nobody_reads_any_more_ends_the_command_in_silence(capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["batch", "--schema"]) == 141
    assert not capsys.readouterr().err


def test_traceback_shows_where_an_error_comes_from(llms):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        cli.main(["generate", "--model", "missing", "p", "--traceback"])


@pytest.mark.parametrize(
    ("raises", "flags", "code"),
    [(RuntimeError, [], 70), (MemoryError, [], 70), (ValueError, ["--traceback"], 2), (ValueError, [], 2)],
)
def test_a_crash_of_the_program_has_an_exit_code_of_its_own(raises, flags, code):
    done = run(broken_generate, raises, argv=["ferrum-jax", "generate", "--model", "m", "p", *flags])
    assert done.returncode == code and "of the test" in done.stderr
    assert ("Traceback" in done.stderr) == (code == 70 or bool(flags))


def broken_generate(raises):

    cli.generate._run = raising(raises("of the test"))
    cli.command()


def test_help_and_the_batch_formats_import_no_jax():
    script = (
        "import sys, ferrum_jax.__main__ as cli, ferrum_jax.batch.job\n"
        "try: cli.main(['batch', '--help'])\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--max-num-seqs" in shown.stdout


def test_convert_writes_a_checkpoint_in_the_weights_own_dtype_or_the_one_asked_for(tmp_path, capsys):
    hf, golden = tmp_path / "hf", GOLDENS / "llama"  # whose weights are bfloat16
    hf.mkdir()
    (hf / "config.json").write_text(
        json.dumps(json.loads((golden / "config.json").read_text()) | {"torch_dtype": "float32"})
    )
    shutil.copy(golden / "model.safetensors", hf)
    for out, asked, size in (("own", [], "0.2 MB in bfloat16"), ("wide", ["--dtype", "float32"], "0.4 MB in float32")):
        assert cli.main(["convert", "--hf", str(hf), "--out", str(tmp_path / out), *asked]) == 0
        assert json.loads((tmp_path / out / "ferrum_jax.json").read_text())["dtype"] == size.split()[-1]
        assert f"29 parameters, {size}, largest rounding 0" in capsys.readouterr().out
    assert cli.main(["convert", "--hf", str(hf), "--out", str(tmp_path / "own")]) == 2
    assert "is not an empty folder; name another output" in capsys.readouterr().err
