"""Faults put into the product on purpose, one at a time, and which test finds each of them.

    python -m scripts.mutants                        every mutant of scripts/mutants.toml
    python -m scripts.mutants key-without-adapter    the mutants that are named
    python -m scripts.mutants --list                 their names

A mutant says the text of a file, what takes its place, and the tests that are to find it, which run in a fork for each
mutant (`mutant_forks`). What finds a mutant must pass without it. A mutant that no test finds has survived, and the
program ends with 1: a test is missing, or it is no fault.
"""

import argparse
import dataclasses
import sys
import time
import tomllib

from scripts.mutant_forks import ROOT, Changes, InForks, changes_of, run_in_forks

TABLE = ROOT / "scripts" / "mutants.toml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault. file, tests: paths in the repository. old: stands in the file once."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def changes(self) -> Changes:
        """Its edit of the functions of its file."""
        path = ROOT / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: its old text stands {text.count(self.old)} times in its file"
        return changes_of(path, compile(text.replace(self.old, self.new), str(path), "exec", dont_inherit=True))


def mutants() -> list[Mutant]:
    """The table's, in its order."""
    return [Mutant(name=name, **fields) for name, fields in tomllib.loads(TABLE.read_text()).items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the names and files, and run nothing")
    asked = parser.parse_args()
    table = {mutant.name: mutant for mutant in mutants()}
    if unknown := [name for name in asked.names if name not in table]:
        parser.error(f"no mutant has the name {', '.join(unknown)}; see --list")
    chosen = [table[name] for name in asked.names or table]
    if asked.list:
        print("\n".join(f"{mutant.name:36} {mutant.file}" for mutant in chosen))
        return
    survivors: list[str] = []

    def work(forks: InForks) -> None:
        for mutant in chosen:
            started_s = time.monotonic()
            own = [name for name in forks.names if name.partition("::")[0] in mutant.tests]
            found = forks.found_by(mutant.changes(), own)
            survivors.extend([mutant.name] if found is None else [])
            print(f"{mutant.name:36} {time.monotonic() - started_s:6.1f} s  {found or 'SURVIVED'}", flush=True)

    run_in_forks(sorted({path for mutant in chosen for path in mutant.tests}), work)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} found" + "".join(f", {name} survived" for name in survivors)
    )
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
