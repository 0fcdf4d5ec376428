"""Integer arithmetic that several modules need."""


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not less than a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not less than a."""
    return -(-a // b) * b
