"""Rare states that histories must reach now and then, by name: a run of many in which one was never met has failed."""

import re
from collections.abc import Mapping

_CHANGES = "(write|fsync|link|replace|unlink|put .*)"
SOMETIMES = {
    **{f"a worker ends with {code}": f"a worker ended with {code}" for code in (1, 75, 130, "OSError", "ValueError")},
    "names are lost with the power": "a name was lost with the power",
    "bytes are lost with the power": "bytes were lost with the power",
    "a worker learns that others took over its rows": "a worker said: another took over its rows",
    "a worker leaves the rest to others": "a worker said: Ended early",
    "a run ends for its deadline": "a worker said: time of this run ends",
    "the lines so far are written at a deadline": "a worker said: has the lines of those",
    "a row has two lines": "a row had two lines",
    "a part is cut": "a part was cut",
    "a part is given back": "a part was given back",
    "a piece of a part is taken": "a piece of a part was taken",
    "a part is taken over": "a part was taken over",
    "a part has its fourth epoch": "a part had its fourth epoch",
    "rows in progress are kept": "rows in progress were kept",
    "a worker is declared dead": "a worker was declared dead",
    "two layouts count in turn": "two layouts counted in turn",
    "a kill before a segment has its name": "kill at (write|fsync|link) of segments",
    "a kill between a segment's name and its folder's sync": "kill at (unlink|sync) of segments",
    "a kill as a lease is made": f"kill at {_CHANGES} of leases",
    "a kill in a heartbeat": f"kill at {_CHANGES} of workers",
    "a kill between the output's rename and its folder's sync": "kill at sync of the output",
    "a kill before the output has its name": "kill at (write|fsync|replace) of the output",
    "a kill between the output and the record of its merge": "kill at .* of merged.json",
    "a kill as the job begins": f"kill at {_CHANGES} of job.json",
    "a kill as the model is recorded": f"kill at {_CHANGES} of model.json",
    "a power cut between the output's rename and its folder's sync": "cut at sync of the output",
    "a power cut in a segment": "cut at (write|fsync|link|unlink|sync) of segments",
    "a power cut as the job begins": f"cut at ({_CHANGES}|sync) of job.json",
    "a power cut between the output and the record of its merge": "cut at .* of merged.json",
    "a worker sleeps through its leases in a segment": f"pause at {_CHANGES} of segments",
    "a worker sleeps through its leases in the merge": "pause at .* of (the output|merged.json)",
    "a worker sleeps as it takes a lease": f"pause at ({_CHANGES}|list) of leases",
    "a full disk in a segment": f"full disk at {_CHANGES} of segments",
    "a full disk in a lease": f"full disk at {_CHANGES} of leases",
    "a full disk in the output": f"full disk at {_CHANGES} of the output",
    "a bad disk in a segment": f"disk error at ({_CHANGES}|sync) of segments",
    "a bad disk in a heartbeat": f"disk error at ({_CHANGES}|sync) of workers",
    "a bad disk in the merge": "disk error at .* of (the output|merged.json)",
    "the answer to a put is lost": "an answer to put was lost",
    "the answer to a list is lost": "an answer to list was lost",
}


def missing(met: Mapping[str, int]) -> list[str]:
    """The names of states that were not met."""
    return [name for name, state in SOMETIMES.items() if not any(re.fullmatch(state, each) for each in met)]
