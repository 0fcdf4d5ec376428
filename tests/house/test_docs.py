"""The documentation and the code agree: links into the code, metrics, exit codes, and names that come from vLLM."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax import __main__ as cli
from ferrum_jax.batch import job, notice
from ferrum_jax.cli import embed
from ferrum_jax.inputs.setting import settings_of
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.distributed import processes
from ferrum_jax.tasks.calls.fields import ELSEWHERE
from scripts import csv_tables, made_tables, models_page
from scripts.docs_hook import line_of, source_links, with_source_pages
from scripts.docs_parameters import as_list
from tests.support import COMPILED, ROOT, small_llm

SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]  # few executables
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def _first_column(page: str) -> list[str]:
    """What stands in the first cells of a page's tables, but for their heads."""
    return re.findall(r"(?m)^\| `?([^`|]+?)`? \|", (DOCS / page).read_text())


def _shown(page: str) -> str:
    """A page with its tables, as the site shows it."""
    return csv_tables.with_tables((DOCS / page).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_a_page_into_the_code_find_what_they_name(page: Path):
    for path, name in source_links(page.read_text()):
        assert line_of(path, name) > 0


def test_a_link_to_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"a page links to LLM.sing in ferrum_jax/llm.py, which defines no sing"):
        line_of("ferrum_jax/llm.py", "LLM.sing")
    with pytest.raises(ValueError, match="defines no sing"):
        with_source_pages("[`LLM.sing`](../ferrum_jax/llm.py)", "p.md")


def test_a_page_reads_without_the_site():
    """As a code host shows it: no macros, and links into the code that open files."""
    for page in PAGES:
        assert not re.search(r"(?<!`)\{\{ ?\w+ ", re.sub(r"(?s)```.*?```|`[^`\n]*`", "", page.read_text())), page
    way = DOCS / "follow-a-token.md"
    links = source_links(way.read_text())
    assert len(links) > 30 and way.read_text().count(".py)") == len(links)
    shown = with_source_pages(way.read_text(), "follow-a-token.md")
    assert ".py)" not in shown and "](source/ferrum_jax/llm.md#__codelineno-0-" in shown


def test_every_field_and_every_command_is_in_the_reference():
    fields = _shown("reference/configuration.md")
    for kind in (EngineConfig, SamplingParams):
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in fields
    commands = (DOCS / "reference/commands.md").read_text()
    for name, _ in made_tables.parsers(cli._parser(), "ferrum-jax"):
        assert f"## {name}\n" in commands
    assert "## ferrum-jax bench\n" in commands and "<!-- made by" in commands
    assert made_tables.with_commands(commands) == commands, "run python -m scripts.made_tables"


def test_the_metrics_are_those_that_an_engine_gives():
    assert sorted(name for _, name, _ in csv_tables.read("metrics")[1:]) == sorted(small_llm("qwen3").stats())


def test_every_architecture_that_is_served_is_in_the_table_of_models():
    table = _shown("reference/models.md")
    assert all(f"`{name}`" in table for name in registry.FAMILIES)
    assert "`BertModel`" in table and "`XLMRobertaModel`" in table


@pytest.mark.parametrize("script", ["made_tables", "models_page"])
def test_tables_that_are_data_are_what_their_script_makes(script: str):
    csv_tables.write({"made_tables": made_tables, "models_page": models_page}[script].tables(), script, check=True)


def test_every_table_that_is_data_is_shown_by_a_page():
    named = {name for page in PAGES for _, name, _ in csv_tables.LINE.findall(page.read_text())}
    assert sorted(named) == sorted(path.stem for path in csv_tables.FOLDER.glob("*.csv"))
    inside = [page for page in PAGES if re.search(r"tables/\w+\.csv", csv_tables.LINE.sub("", page.read_text()))]
    assert not inside, "a link to a table stands on a line of its own"


def test_a_line_that_names_a_table_becomes_the_table():
    shown = csv_tables.with_tables("Before.\n\n[Refused](../tables/refused_models.csv)\n\nAfter.\n")
    assert shown.startswith("Before.\n\n| model_type | why |\n| --- | --- |\n| `") and shown.endswith(" |\n\nAfter.\n")
    assert "| model | h100 | h100:2 | h100:8 |\n" in csv_tables.with_tables("[H100](tables/slices.csv#h100)")
    flags = csv_tables.with_tables("[Flags](../tables/flags.csv#ferrum-jax-cache-save)")
    assert flags.startswith("| argument | what it does |\n") and "| `--model DIR` |" in flags and "--port" not in flags
    with pytest.raises(ValueError, match="rows or columns of a table that begin with 'v9'"):
        csv_tables.with_tables("[A slice](tables/slices.csv#v9)")
    assert csv_tables.as_markdown([["a", "b"], ["x", "1|2*<"]]).endswith("| `x` | 1\\|2\\*\\< |")


def test_the_exit_codes_are_those_of_the_program():
    codes = {int(code) for code in _first_column("reference/exit-codes.md") if code.isdecimal()}
    modules = (cli, job, notice, embed, processes)
    known = {value for module in modules for name, value in vars(module).items() if name.startswith("EXIT_")}
    assert codes == known


def test_the_error_codes_of_rows_are_those_of_the_program():
    page = (DOCS / "reference/file-formats.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "ferrum_jax/batch").rglob("*.py"))
    codes = set(re.findall(r'(?:code=|LineError\()"(\w+)"', sources))
    (table,) = re.findall(r"(?s)\| `error.code` .*?\n\|---.*?\n(.*?)\n\n", page)
    assert {code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.split("|")[1])} == codes


def test_the_page_for_users_of_vllm_has_every_name_that_is_here():
    page = _shown("start/from-vllm.md")
    ours = {name for row in re.findall(r"(?m)^\|[^|]*\|([^|]*)\|", page) for name in re.findall(r"`([^`]+)`", row)}
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= ours
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(re.findall(r"EngineConfig\((\w+)=", page)) <= fields
    assert {field.name for field, said in settings_of(EngineConfig) if said.vllm} <= ours
    methods = {name for name, value in vars(LLM).items() if callable(value) and not name.startswith("_")}
    assert {"generate", "chat", "embed", "stats", "update_weights", "sleep", "wake_up"} <= (ours & methods)
    assert ours & {"encode", "logits_processors"} == set()


def test_what_the_page_for_users_of_vllm_says_is_not_here_is_not_here():
    page = _shown("start/from-vllm.md")
    absent = {name for row in re.findall(r"(?m)^\|([^|]*)\| *\|", page) for name in re.findall(r"`([^`]+)`", row)}
    known = {field.name for kind in (EngineConfig, SamplingParams) for field in dataclasses.fields(kind)}
    assert len(absent) > 35 and not absent & known
    assert not {name for name in absent if hasattr(LLM, name)}
    assert ELSEWHERE.keys() <= absent


def test_docstrings_become_lists_of_parameters():
    text = (
        "What it gives.\n\nmodel: a folder. config, tokenizer: as it says;\nit goes on. other: no parameter.\nRaises X."
    )
    found = as_list(text, {"model", "config", "tokenizer"})
    assert found == (
        "What it gives.\n\n- `model`: a folder.\n"
        "- `config`, `tokenizer`: as it says; it goes on. other: no parameter.\n\nRaises X."
    )


@pytest.mark.slow
def test_the_first_batch_gives_the_text_that_its_page_shows(tmp_path, monkeypatch):
    page = (DOCS / "start/first-batch.md").read_text()
    rows = re.findall(r"(?m)^    (\{.*\})$", page)
    (shown,) = re.findall(r"(?s)```text\n(.*?)```", page)
    (command,) = re.findall(r"(?m)^    (ferrum-jax batch .*out.jsonl)$", page)
    (tmp_path / "in.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split()[1:], *SMALL, "--compilation-cache-dir", str(COMPILED)]) == 0
    texts = [
        json.loads(line)["response"]["body"]["choices"][0]["text"]
        for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert len(texts) == 2 and texts[1].startswith(shown)
