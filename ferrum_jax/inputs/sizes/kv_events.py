"""The text of `kv_events`: where an engine tells what it has cached."""

from typing import NamedTuple


class Endpoints(NamedTuple):
    """ZeroMQ endpoints: of those who are told, and of those who ask again for what they missed, '' for none."""

    endpoint: str
    topic: str
    replay: str


def endpoints_of(text: str) -> Endpoints:
    """The endpoints of a text such as "tcp://*:5557,topic=kv@me,replay=tcp://*:5558". Raises ValueError for another."""
    endpoint, *rest = text.split(",")
    options = {name: value for name, _, value in (part.partition("=") for part in rest)}
    right = {"topic", "replay"}.issuperset(options) and len(options) == len(rest) and "://" in endpoint
    if not right or "://" not in options.get("replay", "://"):
        raise ValueError(
            f"kv_events is {text!r}; it must be a ZeroMQ endpoint, and may name a topic and a second endpoint, such as "
            "'tcp://*:5557,topic=kv-events,replay=tcp://*:5558'"
        )
    return Endpoints(endpoint, options.get("topic", ""), options.get("replay", ""))
