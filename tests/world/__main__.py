"""Histories of jobs, as many as time allows; faults put into the product, and how soon histories find them.

    python -m tests.world histories --seconds 60 --kind disk --rows 40     until a minute of CPU is used
    python -m tests.world histories --keep                                 the counts, in docs/tables/survives.csv
    python -m tests.world replay disk 1234 40                              one history again, with all its calls
    python -m tests.world mutants [NAME ...]                               each of tests/world/mutants.toml

Prints a line of JSON, and of each history that fails its seed and the smallest plan that fails as it does.
"""

import argparse
import itertools
import json
import os
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.csv_tables import FOLDER, Table, as_csv
from scripts.mutants import Mutant
from tests.world.history import FAULTS, STORES, Failed, History, Plan, expected
from tests.world.published import PublishedJob, whole
from tests.world.served import PublishedServer, Served, answers, published_answers

TABLE = Path(__file__).with_name("mutants.toml")
SOMETIMES = tomllib.loads(TABLE.with_name("sometimes.toml").read_text())  # a state that was never met is missing
KINDS: dict[str, tuple[type[History], Callable[[int], object]]] = {  # what is computed before, of an undisturbed one
    **dict.fromkeys(STORES, (History, expected)),
    **dict.fromkeys((f"server-{store}" for store in STORES), (Served, answers)),
    "published-disk": (PublishedJob, lambda num_rows: whole()),
    "server-published-disk": (PublishedServer, lambda num_rows: published_answers()),
}
MOST = 3000  # histories, in which a mutant is found: a minute of CPU where they take longest


def mutants() -> list[Mutant]:
    return [Mutant(name=name, tests=[], **fields) for name, fields in tomllib.loads(TABLE.read_text()).items()]


def histories(
    kinds: Sequence[str], num_rows: int, num_workers: int | None, seed: int, *, seconds: float, most: int | None = None
) -> dict[str, Any]:
    """Until so many seconds of CPU are used, or there were `most`."""
    for kind in kinds:
        KINDS[kind][1](num_rows)
    met, counts, faults, failed = Counter[str](), Counter[str](), Counter[str](), list[str]()
    began_s, took_s = time.process_time(), 1.0
    for number in itertools.islice(itertools.count(seed), most):
        if (took_s := time.process_time() - began_s) > seconds:
            break
        kind = kinds[number % len(kinds)]
        plan = Plan.of(number, kind, num_rows=num_rows, num_workers=num_workers)
        history = history_of(plan)
        try:
            history.run()
        except Failed as error:
            failed.append(f"{kind} {number} {num_rows}")
            print(f"{failed[-1]}: {error}\n    {smallest(plan)}", flush=True)
        counts[kind] += 1
        faults.update({fault.kind for fault in plan.faults})
        counts["starts"] += history.num_starts
        met.update(history.world.met)
    total, are_servers = sum(counts[kind] for kind in kinds), {"server" in kind for kind in kinds}
    wanted = [name for name in SOMETIMES if ("server" in name) in are_servers]
    return {
        "histories": {kind: counts[kind] for kind in kinds},
        "starts": counts["starts"],
        "with": dict(faults),
        "a_minute": round(60 * total / took_s),
        "failed": failed,
        "missing": [name for name in wanted if not any(re.fullmatch(SOMETIMES[name], each) for each in met)],
    }


def history_of(plan: Plan, *, is_logged: bool = False) -> History:
    """The plan as it may happen."""
    return KINDS[plan.kind][0](plan, is_logged=is_logged)


def smallest(plan: Plan) -> tuple[Plan, str]:
    """A failing plan with as few faults as it needs, and why it fails."""
    why = failure_of(plan)
    assert why is not None, "it does not fail"
    place = 0
    while place < len(plan.faults):
        less = plan.without(place)
        found = failure_of(less)
        if found is None:
            place += 1
        else:
            plan, why = less, found
    return plan, why


def failure_of(plan: Plan) -> str | None:
    try:
        history_of(plan).run()
    except Failed as error:
        return str(error)
    return None


def seconds_to_find(mutant: Mutant, num_rows: int) -> float | None:
    """CPU seconds until a history fails with this mutant, in a fork; None where none of MOST does."""
    reader, writer = os.pipe()
    kinds = [kind for kind in KINDS if "published" not in kind and ("server" in kind) == ("server" in mutant.name)]
    for kind in kinds:
        KINDS[kind][1](num_rows)
    changes = mutant.changes()
    if not (pid := os.fork()):
        found: float | None = None
        for function, code in changes:
            function.__code__ = code
        began_s = time.process_time()
        for number in range(MOST):
            try:
                plan = Plan.of(number, kinds[number % len(kinds)], num_rows=num_rows)
                history_of(plan).run()
            except (Failed, AssertionError) as error:
                found = time.process_time() - began_s
                where = f"{plan.kind} {number} {num_rows}"
                print(f"{mutant.name:52} {found:6.1f} s  {where}: {str(error)[:70]}", file=sys.stderr, flush=True)
                break
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as file:
        return json.loads(file.read() or b"null")


def table_of(counts: Mapping[str, int]) -> Table:
    """The table of docs/guides/what-survives.md. counts: histories with each kind of fault."""
    rows = [[how.said, how.promised, f"{counts.get(kind, 0):,}"] for kind, how in FAULTS.items()]
    return [["what", "promised", "histories"], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("histories", "replay", "mutants"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    if asked.what == "mutants":
        chosen = [each for each in mutants() if not asked.names or each.name in asked.names]
        found = {each.name: seconds_to_find(each, asked.rows) for each in chosen}
        print(json.dumps({"found": sum(each is not None for each in found.values()), "of": len(found), "s": found}))
    elif asked.what == "replay":
        kind, seed, num_rows = asked.names
        KINDS[kind][1](int(num_rows))
        history = history_of(Plan.of(int(seed), kind, num_rows=int(num_rows)), is_logged=True)
        try:
            history.run()
        finally:
            print("\n".join([*(history.world.log or ()), str(history.plan), f"trace {history.world.trace:08x}"]))
    else:
        kinds = [asked.kind] if asked.kind else list(KINDS)
        found = histories(kinds, asked.rows, asked.workers, asked.seed, seconds=asked.seconds)
        if asked.keep:
            (FOLDER / "survives.csv").write_text(as_csv(table_of(found["with"])))
        print(json.dumps(found))


if __name__ == "__main__":
    main()
