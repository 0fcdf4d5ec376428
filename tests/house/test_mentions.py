"""Every path, command, flag, field, identifier and decision that a page names exists."""

import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from ferrum_jax import EngineConfig, SamplingParams
from ferrum_jax import __main__ as cli
from scripts import made_tables
from tests.support import ROOT

DOCS = ROOT / "docs"
PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted(DOCS.rglob("*.py"))
COMMANDS = dict(made_tables.parsers(cli._parser(), "ferrum-jax"))
# Names that pages say and the program lacks: vLLM's, jax's and XLA's own, examples, and kinds of names.
OTHERS = {
    *("LoRARequest", "PoolingParams", "beam_search", "get_metrics", "collective_rpc", "apply_model", "start_profile"),
    *("stop_profile", "flat_logprobs", "stream_interval", "skip_reading_prefix_cache", "thinking_token_budget"),
    *("repetition_detection", "disable_fallback", "enable_return_routed_experts", "xla_jf_hlo_deduplication"),
    *("ragged_all_to_all", "memory_analysis", "num_x", "max_x", "x_ids"),
}
# Files that a user has, or that commands of the pages write.
NOT_OURS = (
    r"(in|out|rows|texts|requests|prompts|records|vectors|keys|admins)\.|\.venv|example|^/|build/|^~|"
    r"^checkpoints\.py$|ORG/NAME|path/to"
)
MOVED = "it is not there; say where it is now, or drop it"


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _quoted(page: Path) -> list[str]:
    """What stands between single backticks, but for blocks of code."""
    return re.findall(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", re.sub(r"(?s)```.*?```", "", page.read_text()))


@cache
def _words() -> frozenset[str]:
    """Every word of the program, its scripts and its packaging, and the names of tests."""
    words = set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text()))
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix in (".sh", "")]
    for path in [*scripts, *(path for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.py"))]:
        words.update(re.findall(r"\w+", path.read_text()))
    for path in (ROOT / "tests").rglob("*.py"):
        words.update([path.stem, *re.findall(r"(?m)^ *(?:def|class) (\w+)", path.read_text())])
    return frozenset(words | {path.stem for path in EXAMPLES})


@cache
def _paths() -> frozenset[str]:
    """Every file and folder of the repository, also by the ends of its path."""
    found = set()
    for top in (*PACKAGES, "scripts", "tests", "docs", ".ci"):
        for path in [ROOT / top, *(ROOT / top).rglob("*")]:
            parts = path.relative_to(ROOT).parts
            found.update("/".join(parts[start:]) for start in range(len(parts)))
    return frozenset(found | {path.name for path in ROOT.iterdir()})


def _is_there(path: str) -> bool:
    """Whether a path is one of ours, or one of folders that the program writes: then its words are in the program."""
    path = path.rstrip("/")
    ours = path.split("/")[0] in (*PACKAGES, "scripts", "tests", "docs") or path.endswith(".py")
    written = not ours and all(word in _words() for word in re.findall(r"[a-z_]{3,}", path))
    return path in _paths() or written


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=_name)
def test_paths_exist(page: Path):
    text = re.findall(
        r"(?<![\w/.-])((?:scripts|docs|tests|checkpoints|ferrum_jax|pallas_kernels)/[\w/.-]+)", page.read_text()
    )
    quoted = [each for each in _quoted(page) if re.fullmatch(r"[\w.-]*/[\w./-]*|[\w-]+\.py", each)]
    for path in (found.rstrip(".-") for found in (*text, *quoted)):
        assert _is_there(path) or re.search(NOT_OURS, path), f"{_name(page)} names {path}: {MOVED}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_of_a_folder_that_a_row_describes_are_in_it(page: Path):
    for row in re.findall(r"(?m)^\| `[\w/]+/`.*", page.read_text()):
        folders = re.findall(r"`([\w/]+/)`", row.split(" | ")[0])
        places = [
            folder for folder in (*folders, *(f"ferrum_jax/{each}" for each in folders)) if (ROOT / folder).is_dir()
        ]
        there = {path.name for folder in places for path in (ROOT / folder).rglob("*.py")}
        for name in re.findall(r"`(\w+\.py)`", row) if places else ():
            assert name in there, f"{_name(page)} names {name} in {', '.join(folders)}: {MOVED}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_identifiers_exist(page: Path):
    """Names with an underscore or capitals within, such as fields, functions and classes, are words of the program."""
    for quoted in _quoted(page):
        if re.search(r"(?<!\w)(tests/|-k |scripts/)|<", quoted):
            continue  # a command line, or a mark in a text
        for word in re.findall(r"\b[A-Za-z]\w*_\w+|\b_?[A-Z][a-z]+[A-Z]\w+", quoted):
            assert word in _words() | OTHERS, f"{_name(page)} names {word} in `{quoted}`: {MOVED}"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=_name)
def test_commands_and_their_flags_exist(page: Path):
    text = page.read_text().replace("\\\n", " ")
    groups = {name.split()[1] for name in COMMANDS if " " in name}
    for line in re.findall(r"(?m)^(?: {4}|.*\$ |.*?`)?(ferrum-jax [^\n`]*)", text):
        try:
            words = shlex.split(line.split(" | ")[0].split("  #")[0])
        except ValueError:
            continue  # a sentence with an apostrophe
        names = [name for name in COMMANDS if " " in name and words[: len(name.split())] == name.split()]
        if f"`{line}`" in text:
            assert words[1].startswith("-") or words[1] in groups, f"{_name(page)}: there is no command {line!r}"
        if names:
            used = {word.split("=")[0].rstrip(".,;:)") for word in words if re.match(r"--[a-z]", word)}
            unknown = used - COMMANDS[max(names, key=len)]._option_string_actions.keys()
            assert not unknown, f"{_name(page)}: {line!r} has no {', '.join(sorted(unknown))}"


@cache
def _flags() -> frozenset[str]:
    scripts = (
        path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".flac")
    )
    tests = (ROOT / "tests").rglob("*.py")
    flags = set(re.findall(r"--[a-z][\w-]+", "".join(path.read_text() for path in (*scripts, *tests))))
    for parser in COMMANDS.values():
        flags.update(parser._option_string_actions)
    return frozenset(flags)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_flags_exist(page: Path):
    for quoted in _quoted(page):
        unknown = set(re.findall(r"(?<!\w)--[a-z][\w-]+", quoted)) - _flags()
        assert not {flag for flag in unknown if not flag.startswith("--xla_")}, f"{_name(page)}: `{quoted}`"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_fields_that_a_page_sets_exist(page: Path):
    for kind in (EngineConfig, SamplingParams):
        fields = {field.name for field in dataclasses.fields(kind)}
        for given in re.findall(rf"{kind.__name__}\(([^()\n]*)\)?", page.read_text()):
            unknown = set(re.findall(r"(\w+)=", re.sub(r'"[^"]*"', "", given))) - fields
            assert not unknown, f"{_name(page)}: {kind.__name__} has no {', '.join(sorted(unknown))}"


def test_decisions_exist():
    """Wherever one is named, in pages and in the code, by its number or by its file."""
    there = {path.name[:4]: path.name for path in (DOCS / "decisions").glob("*.md")}
    sources = [path for folder in (*PACKAGES, "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    for path, text in ((path, path.read_text()) for path in (*sources, *PAGES)):
        numbers = set(re.findall(r"[Dd]ecision\s+(\d{4})", text))
        if path.parent.name == "decisions":
            numbers.update(re.findall(r"(?<![\d.,-])00\d\d(?!\d)", text))
        assert numbers <= there.keys(), (
            f"{_name(path)}: there is no decision {', '.join(sorted(numbers - there.keys()))}"
        )
        files = set(re.findall(r"\b(00\d\d-[\w-]+\.md)", text))
        assert files <= set(there.values()), f"{_name(path)}: {', '.join(sorted(files - set(there.values())))}"


def test_a_name_that_is_not_there_is_found():
    assert not _is_there("ferrum_jax/no_such.py") and not _is_there("engine/no_such.py") and not _is_there("nosuch/")
    assert _is_there("ferrum_jax/engine/engine.py") and _is_there("engine/") and _is_there("segments/")
    assert "no_such_field" not in _words() and "max_num_seqs" in _words()
