"""File names that come with data: objects behind a URL, entries of an index, a list of modules or a manifest.

Such a name says which file below a folder is meant, so it must lead nowhere else. Only its text is checked: links in a
local folder are followed, because the user made them or, in a hub's cache, the hub's library.
"""

_LONGEST = 1024  # the limit of object names in cloud stores


def name_inside(name: object, source: object) -> str:
    """The name, relative and below the folder it is joined to. source: what holds it, for the message.

    Raises ValueError for a name that is empty, absolute or too long, that has a step "", "." or "..", a backslash, a
    drive or a control character.
    """
    steps = name.split("/") if isinstance(name, str) else []
    if (
        not isinstance(name, str)
        or len(name) > _LONGEST
        or any(step in ("", ".", "..") for step in steps)
        or any(character == "\\" or ord(character) < 32 or 127 <= ord(character) < 160 for character in name)
        or steps[0][1:2] == ":"
    ):
        shown = repr(name) if len(repr(name)) < 200 else f"{repr(name)[:200]}.."
        raise ValueError(
            f"{source} names the file {shown}; a name must be relative and not lead outside its folder: correct it"
        )
    return name
