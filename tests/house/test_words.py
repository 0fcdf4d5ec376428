"""One word per thing, and plain sentences.

Classes, modules and the glossary's words each name one thing; methods such as `find` and `add` may repeat. Inverted
sentences, in docstrings, comments and pages, are counted against a limit that only falls.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator

from tests.support import ROOT

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
GLOSSARY = ROOT / "docs" / "glossary.md"

# Classes that may share a name, and why.
SHARED_CLASSES = {
    "Case": "each op's cases.py has its own, and what runs them takes any",
    "Task": "what a user asks for, and what a block of threads of a kernel does",
}
# Sentences that begin with these words, and clauses that hang on a genitive.
INVERTED = re.compile(r"(?:^|(?<=[.!?;:] ))(?:Of|Those)\b|\bof which\b|\bof whose\b")
MOST_INVERTED = 0  # it may only fall
# Words whose noun a reader has to guess, and docstrings that begin with one.
PRONOUNS = {"that", "one", "ones", "none", "it", "what", "those", "which", "this", "these", "they", "them", "its"}
PRONOUNS |= {"other", "others"}
RIDDLE = 0.44  # the share of a sentence's words
VAGUE = re.compile(r"(?:What|The same|That of|Those)\b")
MOST_RIDDLES, MOST_VAGUE = 15, 62  # they may only fall


def _sources() -> list[pathlib.Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def _classes() -> dict[str, list[str]]:
    """The places of top-level classes by name; a leading underscore makes no other name."""
    found = collections.defaultdict(list)
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def _words() -> list[str]:
    table = GLOSSARY.read_text().partition("\n## Letters")[0]
    rows = re.findall(r"(?m)^\| ([^|]+) \|", table)[1:]  # without the head
    return [word.strip() for row in rows for word in row.split(",")]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def test_no_two_classes_have_one_name():
    assert {name: places for name, places in _classes().items() if len(places) > 1}.keys() == SHARED_CLASSES.keys()


def test_a_word_has_one_row_in_the_glossary():
    assert len(_words()) > 80 and not _repeated(_words())


def test_classes_that_the_glossary_names_exist():
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", GLOSSARY.read_text()))
    assert named and named <= _classes().keys()


def _comments(text: str) -> Iterator[str]:
    """Comments, with those on neighbouring lines joined."""
    run, last = [], -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(run)
                run = []
            run, last = [*run, token.string.lstrip("#: ")], token.start[0]
    yield " ".join(run)


def _docstrings(text: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    yield from (" ".join((ast.get_docstring(node) or "").split()) for node in nodes)


def _paragraphs(text: str) -> Iterator[str]:
    prose = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    yield from (
        " ".join(part.lstrip("-|#0123456789. ").split()) for part in re.split(r"\n\n|\n(?=[-|#]|\d+\. )| \| ", prose)
    )


def _inverted() -> list[str]:
    """Where a reader has to turn a sentence round, with its words."""
    code = [path for top in (*PACKAGES, "scripts", "tests", "docs") for path in sorted((ROOT / top).rglob("*.py"))]
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = []
    for path in [*code, *pages]:
        text = path.read_text()
        parts = [*_docstrings(text), *_comments(text)] if path.suffix == ".py" else _paragraphs(text)
        found += [
            f"{path.relative_to(ROOT)}: {part[max(match.start() - 30, 0) : match.end() + 60]}"
            for part in parts
            for match in INVERTED.finditer(part)
        ]
    return found


def test_sentences_stand_the_right_way_round():
    found = _inverted()
    assert len(found) <= MOST_INVERTED, "say it with the verb first:\n" + "\n".join(found)


def test_inverted_sentences_are_found():
    text = '"""Of a row. Those wait."""\n# A pool,\n# of which one\n'
    parts = [*_docstrings(text), *_comments(text), *_paragraphs("- Of a\n  row\n\n`of which`, and words")]
    assert sum(len(INVERTED.findall(part)) for part in parts) == 4


def _is_riddle(sentence: str) -> bool:
    words = re.findall(r"[a-z']+", sentence.lower())
    return len(words) > 2 and sum(word in PRONOUNS for word in words) >= RIDDLE * len(words)


def test_docstrings_say_the_noun():
    docstrings = [(path.relative_to(ROOT), text) for path in _sources() for text in _docstrings(path.read_text())]
    vague = [f"{path}: {text[:60]}" for path, text in docstrings if VAGUE.match(text)]
    sentences = [(path, each) for path, text in docstrings for each in re.split(r"(?<=[.!?;:])\s+", text)]
    riddles = [f"{path}: {each}" for path, each in sentences if _is_riddle(each)]
    assert len(riddles) <= MOST_RIDDLES, "say the noun:\n" + "\n".join(riddles)
    assert len(vague) <= MOST_VAGUE, "begin with the noun:\n" + "\n".join(vague)


def test_riddles_are_found():
    assert _is_riddle("None of one that has none.") and not _is_riddle("The grammar's compile error, or None.")


def test_the_names_of_tests_are_short():
    """One line holds them, in a report too."""
    names = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"(?m)^ *(?:async )?def (test_\w+)", path.read_text())
    ]
    long = [f"{path}: {name}" for path, name in names if len(name) > 80]
    assert len(names) > 2000 and not long, "say it in at most 80 letters:\n" + "\n".join(long)
