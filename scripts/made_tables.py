"""Writes the tables of the documentation that say what the program has: flags, fields, families, vLLM's names, counts.

    python -m scripts.made_tables [--check]

A page has `<!-- made by scripts/made_tables.py: NAME ... -->` and `<!-- end -->`, between which this script writes, so
that the page is whole wherever it is read. Fields of bodies and counts of TPUs are data in docs/tables. --check writes
nothing and fails where a table differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ferrum_jax
from ferrum_jax import EngineConfig
from ferrum_jax import __main__ as cli
from ferrum_jax.cli.device_check.estimates import TPU_CEILINGS
from ferrum_jax.inputs.setting import settings_of
from ferrum_jax.models.families.registry import ENCODERS, FAMILIES
from ferrum_jax.openai.body_fields import BODIES, FIELDS, ROW_BODIES, fields_of
from ferrum_jax.openai.schemas import in_words
from ferrum_jax.tasks.calls.fields import AXES, ELSEWHERE
from scripts import csv_tables, kept_counts
from scripts.step_estimates import FILE as STEP_ESTIMATES
from scripts.step_estimates import Estimate
from scripts.tpu_steps import STEPS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_SECTION = re.compile(r"(?s)(<!-- made by scripts/made_tables.py: ([^>]*) -->\n).*?(\n<!-- end -->)")
_SHARED = ("engine", "sampling", "several hosts")  # groups of flags that many commands have: how their titles begin
_WITHOUT_FLAG = {  # of SamplingParams; --seed is another's
    "seed": "any 64-bit integer; None takes one from the engine's seed and the request's content",
    **{name: FIELDS[name].says for name in ("prompt_logprob_token_ids", "prompt_logprob_start")},
    "max_new_tokens": "where `max_tokens` is None, at most this many, and as many as there is room for",
    "transcript": "the rules under which a sound is written down, as `LLM.transcribe` makes them",
}
_SHOWN_LAUNCHES = (  # how the names of launches begin that the laboratory's page shows
    *("llama_8b_decode", "llama_8b_prefill", "deepseek_v3", "product_int8_a16", "product_int8_512"),
    *("product_fp8_a16_16", "product_int4", "xla", "experts", "indexer", "gated_delta", "kda", "mamba2", "jax"),
)
_ENGINE = "ferrum-jax generate"  # a command that has all of them


def main() -> None:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    check = parser.parse_args().check
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (made := with_tables(text)) != text:
            if check:
                raise SystemExit(f"{page.relative_to(ROOT)} differs; run python -m scripts.made_tables")
            page.write_text(made)
    csv_tables.write(tables(), "made_tables", check=check)


def tables() -> dict[str, csv_tables.Table]:
    """The tables that are data, by name."""
    bodies = {"http_bodies": bodies_table("http"), "row_bodies": bodies_table("row")}
    return bodies | {"tpu_launches": tpu_table(), "tpu_steps": steps_table()}


def with_tables(markdown: str) -> str:
    """A page with its tables made anew. Raises KeyError for one that nobody makes."""
    makers = {"config": fields_table, "commands": commands, "vllm": vllm_table, "families": families_table}

    def made(found: re.Match[str]) -> str:
        name, *words = found[2].split()
        return f"{found[1]}\n{makers[name](*words)}\n{found[3]}"

    return _SECTION.sub(made, markdown)


def fields_table(name: str) -> str:
    """Fields of EngineConfig or SamplingParams: name, default, the flag that sets it, and what it means."""
    kind = getattr(ferrum_jax, name)
    said = {field.name: each for field, each in settings_of(kind)} if kind is EngineConfig else {}
    flags = {action.dest: action for action in dict(parsers(cli._parser(), "ferrum-jax"))[_ENGINE]._actions}
    rows = ["| field | values; default | flag | |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        own = _WITHOUT_FLAG.get(field.name) if name == "SamplingParams" else None
        flag = flags.get(field.name) if own is None else None
        shown = "" if flag is None else f"`{flag.option_strings[0]}`"
        text = re.sub(r" \((default|needs --json).*\)$", "", (flag.help if flag else own) or "")
        allowed = str(field.type).replace(" | ", " or ")
        if (setting := said.get(field.name)) is not None:
            text, allowed = setting.sentences(), ", ".join(setting.choices) or allowed
        rows.append(f"| `{field.name}` | {allowed}; `{field.default!r}` | {shown} | {_cell(text)} |")
    return "\n".join(rows)


def bodies_table(door: str) -> csv_tables.Table:
    """Fields of the bodies that come through a door: which bodies take each, its values, and what it means."""
    kinds = BODIES if door == "http" else tuple(ROW_BODIES.values())
    rows = [["field", "bodies", "values", "meaning"]]
    by_body = {kind: fields_of(kind, door) for kind in kinds}
    for name in dict.fromkeys(name for fields in by_body.values() for name in fields):
        said: dict[tuple[str, str], list[str]] = {}
        for kind, fields in by_body.items():
            if name in fields:
                said.setdefault((fields[name].says, in_words(fields[name].schema)), []).append(kind)
        for (says, values), bodies in said.items():
            where = "all" if len(bodies) == len(kinds) else ", ".join(bodies)
            rows.append([name, where, values, says])
    return rows


def vllm_table() -> str:
    """Arguments of vLLM's LLM beside the fields of EngineConfig, then those that have no meaning here."""
    rows = ["| vLLM | here | what is different |", "|---|---|---|"]
    for field, said in settings_of(EngineConfig):
        if said.vllm is not None:
            rows.append(f"| `{said.vllm}` | `{field.name}` | {_cell(said.unlike)} |")
    rows += [f'| `{name}=4` | the same, or `mesh="{axis}=4"` | |' for name, axis in AXES.items()]
    rows += [f"| `{name}` | | {_cell(each.instead)} |" for name, each in ELSEWHERE.items()]
    return "\n".join(rows)


def families_table() -> str:
    """What each family's file says of its architectures, those that it says the same of in a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for architecture, family in (FAMILIES | ENCODERS).items():
        rows.setdefault((family.models, family.notes), []).append(f"`{architecture}`")
        rows[family.models, family.notes] += [f"published as `{name}`" for name in getattr(family, "also", ())]
    table = ["| architecture | models | notes |", "|---|---|---|"]
    return "\n".join(
        [*table, *(f"| {', '.join(names)} | {models} | {notes} |" for (models, notes), names in rows.items())]
    )


def tpu_table() -> csv_tables.Table:
    """Launches that the laboratory shows: cycles on each generation, the share of the bound, and what binds."""
    generations = {"v5e": "v5e", "v6e": "v6e", "v7x": "TPU7x"}
    rows = [["launch", *generations.values()]]
    for launch, kept in kept_counts.read(TPU_CEILINGS)["launches"].items():
        if launch.startswith(_SHOWN_LAUNCHES):
            rows.append([launch, *(_counted(kept[each]) if each in kept else "" for each in generations)])
    return rows


def steps_table() -> csv_tables.Table:
    """Decode steps by estimate: what they take, their bounds, and what others measured."""
    rows = [["step", "rows", "ms", "bound, ms", "share", "tokens/s", "loses most, us (share bound)", "published"]]
    kept = kept_counts.read(STEP_ESTIMATES)["launches"]
    for step in (each for each in STEPS if each.name in kept):
        one = Estimate(**kept[step.name]["step"])
        lost = "; ".join(f"{label} {took:,} ({share:.0%})" for label, (took, share) in _by_loss(one))
        published = "" if step.published is None else f"{step.published[0]:,} ({step.published[1]})"
        share, rate = f"{one.bound_us / one.step_us:.0%}", f"{one.tokens_per_s:,}"
        times = f"{one.step_us / 1e3:.2f}", f"{one.bound_us / 1e3:.2f}"
        rows.append([step.name, f"{step.tokens} of {step.context:,}", *times, share, rate, lost, published])
    return rows


def _by_loss(one: Estimate) -> list[tuple[str, tuple[int, float]]]:
    """What loses most of a step, the largest loss first."""
    return sorted(one.largest.items(), key=lambda item: -item[1][0] * (1 - item[1][1]))


def _counted(one: dict[str, Any]) -> str:
    around = f"; XLA {one['around_cycles']:,}" if one["around_cycles"] > one["cycles"] else ""
    return f"{one['cycles']:,}: {one['share']:.0%}, {one['binds']}{around}"


def commands() -> str:
    """What each command does, its examples and its own flags; then, once, the flags that many have."""
    found = dict(parsers(cli._parser(), "ferrum-jax"))
    return "\n".join([*(_command(name, parser) for name, parser in found.items()), _shared(found[_ENGINE])])


def parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that runs, with its whole name."""
    if parser.get_default("run") is not None:
        yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from parsers(below, f"{name} {word}")


def _command(name: str, parser: Any) -> str:
    others = [each.title for each in parser._action_groups if each.title.startswith(_SHARED) and each._group_actions]
    own = [each for each in parser._action_groups if not each.title.startswith(_SHARED)]
    also = f"\nAlso flags of {', '.join(_link(title) for title in others)}.\n" if others else ""
    examples = "".join(f"    {example}\n" for example in parser.examples)
    return f"## {name}\n\n{parser.description}\n\n{examples}\n{_flags(own)}\n{also}"


def _link(title: str) -> str:
    if title.startswith("several"):
        return "[several hosts](#several-hosts)"
    name, *rest = title.split(",", 1)
    page = {"engine": "configuration.md#engineconfig", "sampling": "configuration.md#samplingparams"}[name]
    return f"[{name}]({page}){''.join(f',{more}' for more in rest)}"


def _shared(parser: argparse.ArgumentParser) -> str:
    (hosts,) = (group for group in parser._action_groups if (group.title or "").startswith("several"))
    return f"## Several hosts\n\nEach host has the whole command.\n\n{_flags([hosts])}"


def _flags(groups: list[Any]) -> str:
    rows = ["| argument | what it does |", "|---|---|"]
    for action in (action for group in groups for action in group._group_actions):
        if action.help in (None, argparse.SUPPRESS) or action.dest in ("help", "help_all"):
            continue
        takes = "" if action.nargs == 0 else f" {action.metavar or _choices(action)}"
        flag = ", ".join(action.option_strings)
        rows.append(f"| `{(flag + takes).strip()}` | {_cell(action.help)} |")
    return "\n".join(rows)


def _choices(action: argparse.Action) -> str:
    return action.dest.upper() if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"


def _cell(text: str | None) -> str:
    """A text as a cell of a table takes it."""
    assert "%(" not in (text or ""), f"{text!r} differs from machine to machine"
    return re.sub(r"([|*<])", r"\\\1", text or "")


if __name__ == "__main__":
    main()
