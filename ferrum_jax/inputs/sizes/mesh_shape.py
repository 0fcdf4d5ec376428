"""MeshShape: how many devices a mesh has along each axis; and which devices it is made of."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis of a mesh. dp: data shards, each with rows of its own. tp: devices that share their work.

    has_experts_once: the experts are spread over all devices, and every shard sends its tokens there; otherwise each
    shard has all experts.
    """

    dp: int = 1
    tp: int = 1
    has_experts_once: bool = True

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """The shape of a text such as "tp=4" or "dp=2,tp=4". Raises ValueError with what it should be.

        ep is the number of devices that the experts are spread over: tp or, by default, dp * tp. Given alone, it is
        dp, too.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in ("dp", "tp", "ep") or name in sizes or not size.isdecimal() or int(size) < 1:
                raise ValueError(
                    f"mesh is {text!r}; it must name numbers of devices along dp and tp, such as 'tp=4' or "
                    "'dp=2,tp=4', and may name those that the experts are spread over, as in 'dp=2,tp=4,ep=4'"
                )
            sizes[name] = int(size)
        ep = sizes.pop("ep", None)
        dp, tp = (ep or 1, 1) if not sizes else (sizes.get("dp", 1), sizes.get("tp", 1))
        if ep not in (None, tp, dp * tp):
            choices = " or ".join(str(size) for size in dict.fromkeys((tp, dp * tp)))
            raise ValueError(
                f"mesh is {text!r}; ep is {ep}, and experts are spread over the devices of a shard or of "
                f"all: ep may be {choices}"
            )
        return cls(dp=dp, tp=tp, has_experts_once=ep in (None, dp * tp))

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def ep(self) -> int:
        """Devices that the experts are spread over."""
        return self.size if self.has_experts_once else self.tp

    def __str__(self) -> str:
        text = f"tp={self.tp}" if self.dp == 1 else f"dp={self.dp},tp={self.tp}"
        return text if self.has_experts_once else f"{text},ep={self.tp}"


def ids_of(devices: Any) -> Any:
    """The ids of devices or of a mesh; what is neither is left for the check."""
    if hasattr(devices, "axis_names"):
        devices = devices.devices.flatten().tolist()
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        return devices
    return tuple(getattr(device, "id", device) for device in devices)


def wrong_ids(ids: Sequence[Any]) -> str | None:
    """How to correct ids of devices, or None where they are correct."""
    if ids and all(isinstance(one, numbers.Integral) and not isinstance(one, bool) for one in ids):
        return None
    return "name device ids, such as (4, 5, 6, 7)"


def devices_of(ids: Sequence[int], devices: Sequence[Any]) -> list[Any]:
    """The devices of these ids. Raises ValueError for ids that none of them has."""
    by_id = {device.id: device for device in devices}
    unknown = [id for id in ids if id not in by_id]
    if unknown or len(set(ids)) < len(ids):
        what = f"{unknown}, and there are {sorted(by_id)}" if unknown else f"{list(ids)}, one of them twice"
        raise ValueError(f"devices names {what}; name each device that is to work once")
    return [by_id[id] for id in ids]
