"""Forms: how a weight is kept, apart from the format in which it was published.

A dense weight is one array [.., out, in]. A weight with a form is several, its *leaves*, and stands for

    value[o, i] = (code[o, i] - zero[o, g]) * scale[o, g]          g = i // group

    codes [.., out, in], or [.., out, in / 2] with two codes a byte, the low half first     scales [.., out, in / group]
    zeros as scales, where codes have zero points     order [.., in]: input i of the codes is input order[i] of x
    input_scale [.., 1]: of activations that are rounded by a scale known beforehand

Scales of tensors and of blocks of several outputs are repeated for each output, so that every form is cut, stacked and
placed alike. Formats are readers in `checkpoints/formats/` that give a form; nothing else knows them.
"""

import dataclasses
import math
import re

LEAVES = ("codes", "scales", "zeros", "order", "input_scale")
# Kind of code -> dtype of the codes' array, codes in one of its elements, dtype of zero points.
_KINDS = {
    "int8": ("int8", 1, "int16"),
    "int4": ("uint8", 2, "int8"),  # unsigned on the device: without zero points 8 is taken off
    "fp8_e4m3": ("float8_e4m3fn", 1, None),
    "mxfp4": ("uint8", 2, None),  # E2M1
}
KINDS = tuple(_KINDS)
ROUNDINGS = ("int8", "fp8_e4m3")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "uint8")  # uint8 holds E8M0: 2^(byte - 127)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightForm:
    """How one weight is kept.

    kind: what a code means, one of KINDS. group: inputs of an output that share a scale; None is all of them.
    has_zeros, has_order: whether there are zero points, and an order of inputs.
    activations: what x is rounded to before the product, one of ROUNDINGS, or None.
    activation_group: inputs of a token that share a scale of activations; None is all of them.
    has_input_scale: all tokens share a scale that is known beforehand; else each has its own, and with
    has_power_scales it is the next power of two (UE8M0).
    """

    kind: str
    group: int | None = None
    scale_dtype: str = "float32"
    has_zeros: bool = False
    has_order: bool = False
    activations: str | None = None
    activation_group: int | None = None
    has_input_scale: bool = False
    has_power_scales: bool = False

    def __post_init__(self) -> None:
        for field, known in (("kind", KINDS), ("scale_dtype", SCALE_DTYPES), ("activations", (None, *ROUNDINGS))):
            if getattr(self, field) not in known:
                raise ValueError(f"a form's {field} is {getattr(self, field)!r}; it must be one of {known}")
        for field in ("group", "activation_group"):
            size = getattr(self, field)
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"a form's {field} is {size!r}; it must be a number of inputs, or None for all")
        if self.has_zeros and _KINDS[self.kind][2] is None:
            raise ValueError(f"codes of kind {self.kind!r} have no zero points; integers alone have")

    def leaves(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """{leaf: (shape, name of its dtype)} of a weight [.., out, in]. Raises ValueError where `problem` has one."""
        if (wrong := self.problem(shape)) is not None:
            raise ValueError(wrong)
        *lead, num_out, num_in = shape
        dtype, packing, zero_dtype = _KINDS[self.kind]
        groups = (*lead, num_out, 1 if self.group is None else num_in // self.group)
        found = {"codes": ((*lead, num_out, num_in // packing), dtype), "scales": (groups, self.scale_dtype)}
        if self.has_zeros:
            assert zero_dtype is not None
            found["zeros"] = (groups, zero_dtype)
        if self.has_order:
            found["order"] = ((*lead, num_in), "int32")
        if self.has_input_scale:
            found["input_scale"] = ((*lead, 1), "float32")
        return found

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight or part of this shape cannot have this form, or None."""
        num_in, unit = shape[-1], self.unit
        return None if num_in % unit == 0 else f"{num_in} inputs are no multiple of {unit}, which share a scale or byte"

    @property
    def unit(self) -> int:
        """Inputs that cannot be parted: a group, or the codes of one byte."""
        return math.lcm(self.group or 1, _KINDS[self.kind][1], self.activation_group or 1)


def is_packed(dtype: str) -> bool:
    """True of an array of codes that has two in a byte."""
    return dtype == "uint8"


def weight_of_leaf(name: str) -> tuple[str, str] | None:
    """(name of the weight, leaf) of a parameter that is a leaf of a form, else None."""
    weight, _, leaf = name.rpartition(".")
    return (weight, leaf) if leaf in LEAVES and weight else None


def weight_of(name: str) -> str:
    """The weight that a parameter is, or is a leaf of."""
    found = weight_of_leaf(name)
    return name if found is None else found[0]


def made_form(text: str) -> WeightForm | None:
    """The form that weights are quantised to by this name; None for "auto", which quantises nothing.

    "int8" and "fp8" have a scale for each output and round activations too, each token by its own scale; "int8-a16" and
    "fp8-a16" leave activations as they are. "int4-g64" has a scale for each 64 inputs; "int4" is "int4-g128".
    "mxfp4" has a scale for each 32 inputs, a power of two.
    Raises ValueError for other names.
    """
    if text == "auto":
        return None
    if text == "mxfp4":
        return WeightForm(kind="mxfp4", group=32, scale_dtype="uint8")
    found = re.fullmatch(r"(int8|fp8)(-a16)?|int4(-g(\d{1,6}))?", text)
    group = int(found[4] or 128) if found else 0
    if found is None or group < 2 or group % 2:
        raise ValueError(
            f"weights is {text!r}; it must be 'auto', 'int8', 'int8-a16', 'fp8', 'fp8-a16', 'mxfp4', 'int4' or "
            "'int4-gN' with an even N"
        )
    if found[1] is None:
        return WeightForm(kind="int4", group=group, scale_dtype="bfloat16")
    kind = {"int8": "int8", "fp8": "fp8_e4m3"}[found[1]]
    return WeightForm(kind=kind, activations=None if found[2] else kind)
