"""What models are known to write, and the message that each text is, from form_samples.toml."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

_READ = tomllib.loads((Path(__file__).parent / "form_samples.toml").read_text())


@dataclasses.dataclass(frozen=True)
class Sample:
    """forms: of calls and of reasoning. calls: name and arguments of each, and its id where the model gives one."""

    forms: tuple[str | None, str | None]
    text: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[Any, ...], ...] = ()
    is_open: bool = False


def _sample(forms: list[str], calls: str = "[]", **values: Any) -> Sample:
    return Sample((forms[0] or None, forms[1] or None), calls=tuple(map(tuple, json.loads(calls))), **values)


NOW = ("now", {})
TOOLS: list[dict[str, Any]] = json.loads(_READ["tools"])
DEMANDED: dict[str, str] = _READ["demanded"]
TEMPLATES = {
    name: (text, calls or None, thoughts or None) for name, (text, calls, thoughts) in _READ["templates"].items()
}
SAMPLES = {name: _sample(**values) for name, values in _READ["samples"].items()}
