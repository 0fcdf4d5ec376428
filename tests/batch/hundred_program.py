"""Four unlike workers share a job, are killed ten times and started again; its end is set beside its plan.

    python -m tests.batch.hundred_program                                    100,000 rows, about 7 minutes
    python -m tests.batch.hundred_program --rows 3000 --seconds 40 --kills 4
    python -m tests.batch.hundred_program late                               a deadline that cannot be kept

Workers are processes over fake devices whose rates are 1:2:4:8: a device takes as long for a step whatever the host
does, unless the host comes late, which is counted. The plan before the start is what `batch --plan` says on each
machine after another job there. Prints lines of what is foreseen and what happens, and one of JSON at the end.
"""

import argparse
import dataclasses
import json
import operator
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.input.files import reading_rows
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import EXIT_OK
from ferrum_jax.batch.job_plan import measured_outlook, outlook_rows
from ferrum_jax.io.files.store import open_store
from tests.batch.fake_llm import json_lines
from tests.batch.machine import Machine
from tests.batch.running import num_lines

RATES = (1, 2, 4, 8)
_EARLIER_S = 15.0  # of the other job on each machine, or a tenth of this one
_LEFT = re.compile(r"(\d+):(\d\d):(\d\d) left")


@dataclasses.dataclass(kw_only=True)
class Hundred:
    """A job of `num_rows` in a folder that takes its four machines `seconds` if nothing happens."""

    folder: Path
    num_rows: int
    seconds: float
    random: random.Random

    def __post_init__(self) -> None:
        self.input, self.output = self.folder / "in.jsonl", self.folder / "out.jsonl"
        self.write(self.input, self.num_rows)
        rates = [self.num_rows / self.seconds * throughput / sum(RATES) for throughput in RATES]  # rows a second
        self.machines = [
            Machine(self.folder / f"machine-{throughput}", rate=rate, is_quick=self.seconds < 300)
            for throughput, rate in zip(RATES, rates, strict=True)
        ]

    def write(self, path: Path, num_rows: int) -> None:
        """Rows of 4 to 12 tokens, 8 on average."""
        path.write_bytes(
            json_lines(
                {"custom_id": f"row-{i}", "prompt": f"Say {i} in words.", "max_tokens": 4 + i * 7 % 9}
                for i in range(num_rows)
            )
        )

    # -- the plan ----------------------------------------------------------------------------------------

    def measure(self) -> list[WorkerReport]:
        """The throughput of each machine in another job there, which all run beside each other."""
        seconds = min(_EARLIER_S, max(self.seconds / 10, 4.0))
        for machine, throughput in zip(self.machines, RATES, strict=True):
            num_rows = round(self.num_rows / self.seconds * throughput / sum(RATES) * seconds)
            self.write(machine.folder / "in.jsonl", max(num_rows, 64))
            machine.start(machine.folder / "in.jsonl", machine.folder / "out.jsonl")
        codes = [machine.wait() for machine in self.machines]
        assert codes == [EXIT_OK] * len(RATES), f"the other jobs ended with {codes}"
        return [machine.throughput() for machine in self.machines]

    def plan(self, known: list[WorkerReport]) -> dict[str, float]:
        """What `batch --plan` says on each machine, and what follows for all of them. known: their throughputs."""
        terms, now = EndTerms(deadline=time.time() + 2 * self.seconds), time.time()
        store, ways = open_store(f"{self.output}.journal"), []
        with open(self.input, "rb") as raw, reading_rows(raw, str(self.input)) as file:
            rows = Rows(file, 0, ["fake"], in_turn=True)
            for machine, throughput in zip(self.machines, known, strict=True):
                found = measured_outlook(rows, store, terms, now, throughput)
                assert found is not None, "no throughput was measured"
                ways.append(found[0])
                print(machine.folder.name, *outlook_rows(*found, terms, now)[1], sep=": ")
        return {
            name: 1 / sum(1 / getattr(way, field) for way in ways)
            for name, field in (("low", "low_s"), ("middle", "seconds"), ("high", "high_s"))
        }

    # -- the job -----------------------------------------------------------------------------------------

    def run(self, kills: int, middle_s: float, deadline: float) -> dict[str, Any]:
        """Runs the job by the deadline with so many kills before `middle_s`; what happened."""
        at_s = sorted(self.random.uniform(0.02, 0.92) * middle_s for _ in range(kills))
        victims = [*range(len(RATES))] * (kills // len(RATES))
        victims += self.random.sample(range(len(RATES)), kills % len(RATES))
        self.random.shuffle(victims)
        began_s, back_s, killed = time.monotonic(), dict[int, float](), list[str]()
        for machine in self.machines:
            machine.start(self.input, self.output, deadline)
        while back_s or any(machine.is_at_work for machine in self.machines):
            gone_s = time.monotonic() - began_s
            for number in [number for number, when_s in back_s.items() if when_s <= gone_s]:
                del back_s[number]
                self.machines[number].start(self.input, self.output, deadline)
            if at_s and gone_s >= at_s[0]:
                at_work = [each for each in victims if each not in back_s and self.machines[each].is_at_work]
                if at_work and self.machines[at_work[0]].kill():
                    at_s.pop(0)
                    victims.remove(at_work[0])
                    back_s[at_work[0]] = gone_s + self.random.uniform(0.003, 0.025) * self.seconds
                    killed.append(f"{RATES[at_work[0]]}x at {gone_s:.0f} s for {back_s[at_work[0]] - gone_s:.1f} s")
            time.sleep(0.02)
        return {"took_s": time.monotonic() - began_s, "began_s": began_s, "killed": killed, "not_killed": len(at_s)}

    def foreseen(self, began_s: float, at_s: float) -> dict[int, float]:
        """The end, in seconds after the start, as each machine shows it last in the 15 s before then; by its rate."""
        found = {}
        for machine, throughput in zip(self.machines, RATES, strict=True):
            for when_s, line in machine.shown():
                left = _LEFT.search(line)
                if left and max(at_s - 15, 0) < when_s - began_s <= at_s:
                    hours, minutes, seconds = map(int, left.groups())
                    found[throughput] = round(when_s - began_s + 3600 * hours + 60 * minutes + seconds, 1)
        return found

    def prove(self) -> dict[str, Any]:
        """The output is that of a job that nobody kills; what the journal holds, and which files are left."""
        alone = Machine(self.folder / "alone", rate=None)
        alone.start(self.input, self.folder / "alone.jsonl")
        assert alone.wait() == EXIT_OK
        assert self.output.exists(), f"rows are left; the workers ended with {[each.code for each in self.machines]}"
        assert self.output.read_bytes() == (self.folder / "alone.jsonl").read_bytes(), "the bytes differ"
        workers = {path.name for path in Path(f"{self.output}.journal/workers").iterdir()}
        silent = [name for name in workers if name.endswith(".beat") and f"{name[:-5]}.dead" not in workers]
        return {
            "rows": self.output.read_bytes().count(b"\n"),
            "most_lines_of_a_row": max(num_lines(self.output).values()),
            "partial_output": Path(f"{self.output}.journal/partial.out.jsonl").exists(),
            "torn_files": len(list(self.folder.glob(".*"))),  # beside the output
            "torn_files_in_journal": sum(1 for path in Path(f"{self.output}.journal").rglob(".*")),
            "workers_without_an_end": len(silent),
            "processes_left": sum(machine.num_left() for machine in self.machines),
        }


def run_hundred(job: Hundred, kills: int, slack: float) -> dict[str, Any]:
    """slack: the deadline, as a share of the plan's middle."""
    plan = job.plan(job.measure())
    within_s = slack * plan["middle"]
    print(
        f"plan of all: {plan['middle']:.0f} s ({plan['low']:.0f} to {plan['high']:.0f}), deadline in {within_s:.0f} s"
    )
    found = job.run(kills, plan["middle"], time.time() + within_s)
    took_s, began_s = found.pop("took_s"), found.pop("began_s")
    shares = [min(60.0, job.seconds / 4), took_s / 4, took_s / 2, 0.75 * took_s]
    shown = {f"{at_s:.0f} s": job.foreseen(began_s, at_s) for at_s in shares}
    for at, ends in shown.items():
        print(
            f"the end as shown at {at}",
            ", ".join(f"{throughput}x {end_s} s" for throughput, end_s in ends.items()),
            sep=": ",
        )
    down_s = [machine.down_s() for machine in job.machines]
    for machine, seconds in zip(job.machines, down_s, strict=True):
        share, ended_s = machine.idle()
        said = f"down for {seconds:.0f} s; {share:.1%} of its last run waited for the host; its last step ended after"
        print(machine.folder.name, f"{said} {ended_s - began_s:.1f} s", sep=": ")
    cpu_s = sum(machine.cpu_s for machine in job.machines)
    return {
        **found,
        "codes": [machine.code for machine in job.machines],
        "starts": [machine.num_starts for machine in job.machines],
        "in_time": took_s <= within_s,
        "took_s": round(took_s, 1),
        "plan_s": {name: round(seconds, 1) for name, seconds in plan.items()},
        "took_for_plan": round(took_s / plan["middle"], 3),
        "took_for_shown": {at: round(took_s * len(ends) / sum(ends.values()), 3) for at, ends in shown.items() if ends},
        "cpus_used": round(cpu_s / took_s, 2),
        "most_waits_for_host": round(max(machine.idle()[0] for machine in job.machines), 3),
        "lost_to_kills": round(sum(map(operator.mul, RATES, down_s)) / sum(RATES) / took_s, 3),
        **job.prove(),
    }


def run_late(job: Hundred) -> dict[str, Any]:
    """Two starts with a quarter of the time that is needed: of the fastest machine, then of all."""
    codes, fastest = [], job.machines[-1]
    for machines in ([fastest], job.machines):
        for machine in machines:
            machine.start(job.input, job.output, time.time() + job.seconds / 4)
        codes.append([machine.wait() for machine in machines])
        print(
            "\n".join(
                line for _, line in fastest.shown(last=True) if line.startswith(("Ends by", "Does not fit", "Stopped"))
            )
        )
    shown = [line for _, line in fastest.shown(last=True)]
    number = re.search(r"Does not fit.* ([\d,]+) workers like this one would do it", " ".join(shown[:2]))
    partial = Path(f"{job.output}.journal/partial.out.jsonl")
    report = json.loads(Path(f"{job.output}.report.json").read_bytes())
    return {
        "codes": codes,
        "workers_said_at_start": number and int(number[1].replace(",", "")),
        "output": job.output.exists(),
        "partial": report["ending"]["partial"] == str(partial) and f"{partial} has the lines" in shown[-1],
        "partial_rows": partial.read_bytes().count(b"\n"),
        "done_rows": report["rows"]["ok"],
        "rows": job.num_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("killed", "late"), default="killed")
    parser.add_argument("--rows", type=int, help="100,000; 2,000 with a deadline that cannot be kept")
    parser.add_argument("--seconds", type=float, help="that the machines need if nothing happens; 360, or 40")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--slack", type=float, default=1.3, help="the deadline for the plan's middle")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    is_late = args.what == "late"
    with tempfile.TemporaryDirectory() as folder:
        num_rows, seconds = args.rows or (2000 if is_late else 100_000), args.seconds or (40.0 if is_late else 360.0)
        job = Hundred(folder=Path(folder), num_rows=num_rows, seconds=seconds, random=random.Random(args.seed))
        found = run_late(job) if is_late else run_hundred(job, args.kills, args.slack)
    assert "jax" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
