"""Writes the tables of the documentation that say what the program has: flags, fields, families, vLLM's names, counts.

    python -m scripts.made_tables [--check]

They are data in docs/tables. The page of commands has `<!-- made by scripts/made_tables.py -->` and `<!-- end -->`,
between which this script writes the sections that show them. --check writes nothing and fails where something differs.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ferrum_jax
from ferrum_jax import EngineConfig
from ferrum_jax import __main__ as cli
from ferrum_jax.cli.device_check.estimates import TPU_CEILINGS
from ferrum_jax.inputs.params.parameter import Parameter
from ferrum_jax.inputs.setting import Setting, settings_of
from ferrum_jax.models.families.registry import ENCODERS, FAMILIES
from ferrum_jax.openai.body_fields import BODIES, ROW_BODIES, fields_of
from ferrum_jax.openai.schemas import in_words
from ferrum_jax.sampling_params import PARAMETERS
from ferrum_jax.tasks.calls.fields import AXES, ELSEWHERE
from pallas_kernels.paged_attention.gpu.ceilings import FILE as GPU_CEILINGS
from pallas_kernels.paged_attention.gpu.ceilings import seconds_of
from scripts import csv_tables, kept_counts
from scripts.step_estimates import FILE as STEPS
from scripts.step_estimates import Estimate, step_rows

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs/reference/commands.md"
_SECTIONS = re.compile(r"(?s)(<!-- made by scripts/made_tables.py -->\n).*?(\n<!-- end -->)")
_SHARED = ("engine", "sampling", "several hosts")  # groups of flags that many commands have: how their titles begin
_SHOWN_LAUNCHES = (  # how the names of launches begin that the laboratory's page shows
    *("llama_8b_decode", "llama_8b_prefill", "deepseek_v3", "product_int8_a16", "product_int8_512"),
    *("product_fp8_a16_16", "product_int4", "xla", "experts", "indexer", "gated_delta", "kda", "mamba2", "jax"),
)
_SHOWN_ON_HOPPER = ("llama_8b", "gemma4_mixed", "oss_decode", "jax", "product")
_ENGINE = "ferrum-jax generate"  # a command that has all of them


def main() -> None:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    check = parser.parse_args().check
    text = COMMANDS.read_text()
    if (made := with_commands(text)) != text:
        if check:
            raise SystemExit(f"{COMMANDS.relative_to(ROOT)} differs; run python -m scripts.made_tables")
        COMMANDS.write_text(made)
    csv_tables.write(tables(), "made_tables", check=check)


def tables() -> dict[str, csv_tables.Table]:
    """The tables by name."""
    return {
        "engine_config": fields_table("EngineConfig"),
        "sampling_params": fields_table("SamplingParams"),
        "flags": flags_table(),
        "from_vllm": vllm_table(),
        "families": families_table(),
        "http_bodies": bodies_table("http"),
        "row_bodies": bodies_table("row"),
        "gpu_launches": gpu_table(),
        "tpu_launches": tpu_table(),
        "tpu_steps": steps_table(),
    }


def with_commands(markdown: str) -> str:
    """The page of commands with its sections made anew."""
    return _SECTIONS.sub(lambda found: f"{found[1]}\n{commands()}\n{found[2]}", markdown)


def fields_table(name: str) -> csv_tables.Table:
    """Fields of EngineConfig or SamplingParams: name, default, the flag that sets it, and what it means."""
    kind = getattr(ferrum_jax, name)
    of_engine = {field.name: said for field, said in settings_of(EngineConfig)}
    texts: Mapping[str, Setting | Parameter] = of_engine if kind is EngineConfig else PARAMETERS
    flags = {action.dest: action for action in dict(parsers(cli._parser(), "ferrum-jax"))[_ENGINE]._actions}
    rows = [["field", "values; default", "flag", "meaning"]]
    for field in dataclasses.fields(kind):
        said = texts[field.name]
        flag = flags.get(field.name) if said.has_flag else None
        shown = "" if flag is None else f"`{flag.option_strings[0]}`"
        allowed = ", ".join(getattr(said, "choices", ())) or str(field.type).replace(" | ", " or ")
        rows.append([field.name, f"{allowed}; `{field.default!r}`", shown, _checked(said.sentences())])
    return rows


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


def vllm_table() -> csv_tables.Table:
    """Arguments of vLLM's LLM beside the fields of EngineConfig, then those that have no meaning here."""
    rows = [["vLLM", "here", "what is different"]]
    for field, said in settings_of(EngineConfig):
        if said.vllm is not None:
            rows.append([said.vllm, f"`{field.name}`", said.unlike])
    rows += [[f"{name}=4", f'the same, or `mesh="{axis}=4"`', ""] for name, axis in AXES.items()]
    return [*rows, *([name, "", each.instead] for name, each in ELSEWHERE.items())]


def families_table() -> csv_tables.Table:
    """What each family's file says of its architectures, those that it says the same of in a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for architecture, family in (FAMILIES | ENCODERS).items():
        rows.setdefault((family.models, family.notes), []).append(f"`{architecture}`")
        rows[family.models, family.notes] += [f"published as `{name}`" for name in getattr(family, "also", ())]
    named = ([", ".join(names), models, notes] for (models, notes), names in rows.items())
    return [["architecture", "models", "notes"], *named]


def tpu_table() -> csv_tables.Table:
    """Launches that the laboratory shows: cycles on each generation, the share of the bound, and what binds."""
    generations = {"v5e": "v5e", "v6e": "v6e", "v7x": "TPU7x"}
    rows = [["launch", *generations.values()]]
    for launch, kept in kept_counts.read(TPU_CEILINGS)["launches"].items():
        if launch.startswith(_SHOWN_LAUNCHES):
            rows.append([launch, *(_counted(kept[each]) if each in kept else "" for each in generations)])
    return rows


def gpu_table() -> csv_tables.Table:
    """Kernels that multiply, of launches that the laboratory shows: registers, a trip, and what each unit takes."""
    units = {"issue": "issue", "warp": "one warp", "wgmma": "wgmma", "mufu": "MUFU", "shared": "shared memory"}
    head = ["launch", "kernel", "registers (spilled bytes)", "trip: instructions, stalls, waits"]
    rows = [[*head, *units.values(), "HBM, H200", "ceiling, H200", "ceiling, H100"]]
    found = kept_counts.read(GPU_CEILINGS)["launches"].items()
    for launch, name, one in ((launch, *item) for launch, kernels in found for item in kernels.items()):
        if launch.startswith(_SHOWN_ON_HOPPER) and (trip := one["compute"]) and one["hbm_bytes"]:
            busy = [seconds_of(unit, one["cycles"][unit], "h200") for unit in units]
            hbm = [seconds_of("hbm", one["hbm_bytes"], chip) for chip in ("h200", "h100")]
            times = (*busy, hbm[0], *(max(*busy, each) for each in hbm))
            counts = f"{trip['instructions']}, {trip['stalls']}, {trip['waits']}"
            registers = f"{one['registers']} ({one['spill_bytes']})"
            rows.append([launch, name, registers, counts, *(f"{s * 1e6:,.1f}" for s in times)])
    return rows


def steps_table() -> csv_tables.Table:
    """The decode steps whose estimates are kept."""
    return step_rows({name: Estimate(**one["step"]) for name, one in kept_counts.read(STEPS)["launches"].items()})


def _counted(one: dict[str, Any]) -> str:
    around = f"; XLA {one['around_cycles']:,}" if one["around_cycles"] > one["cycles"] else ""
    return f"{one['cycles']:,}: {one['share']:.0%}, {one['binds']}{around}"


def commands() -> str:
    """What each command does, its examples and a link to its flags; then, once, the flags that many have."""
    found = dict(parsers(cli._parser(), "ferrum-jax"))
    shared = "## Several hosts\n\nEach host has the whole command.\n\n[Flags](../tables/flags.csv#several-hosts)\n"
    return "\n".join([*(_command(name, parser) for name, parser in found.items()), shared])


def flags_table() -> csv_tables.Table:
    """The flags of each command that it does not share; then, once, those of several hosts."""
    rows = [["command", "argument", "what it does"]]
    found: dict[str, Any] = dict(parsers(cli._parser(), "ferrum-jax"))
    for name, parser in found.items():
        own = [each for each in parser._action_groups if not each.title.startswith(_SHARED)]
        rows += ([name, *flag] for flag in _flags(own))
    (hosts,) = (each for each in found[_ENGINE]._action_groups if (each.title or "").startswith("several"))
    return [*rows, *(["several hosts", *flag] for flag in _flags([hosts]))]


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
    also = f"\nAlso flags of {', '.join(_link(title) for title in others)}.\n" if others else ""
    examples = "".join(f"    {example}\n" for example in parser.examples)
    flags = f"[Flags](../tables/flags.csv#{name.replace(' ', '-')})"
    return f"## {name}\n\n{parser.description}\n\n{examples}\n{flags}\n{also}"


def _link(title: str) -> str:
    if title.startswith("several"):
        return "[several hosts](#several-hosts)"
    name, *rest = title.split(",", 1)
    page = {"engine": "configuration.md#engineconfig", "sampling": "configuration.md#samplingparams"}[name]
    return f"[{name}]({page}){''.join(f',{more}' for more in rest)}"


def _flags(groups: list[Any]) -> Iterator[list[str]]:
    """The arguments of groups, and what each does."""
    for action in (action for group in groups for action in group._group_actions):
        if action.help not in (None, argparse.SUPPRESS) and action.dest not in ("help", "help_all"):
            takes = "" if action.nargs == 0 else f" {action.metavar or _choices(action)}"
            yield [f"{', '.join(action.option_strings)}{takes}".strip(), _checked(action.help)]


def _choices(action: argparse.Action) -> str:
    return action.dest.upper() if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"


def _checked(text: str) -> str:
    """A text, once it is known to be the same on every machine."""
    assert "%(" not in text, f"{text!r} differs from machine to machine"
    return text


if __name__ == "__main__":
    main()
