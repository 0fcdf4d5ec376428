"""Where the doors differ about one body: why, by section. The answers themselves are in answers/."""

from collections.abc import Mapping, Sequence

from tests.rows import rows_beside

BySection = Mapping[str, Sequence[str]]

ANSWERED_ELSEWHERE: Mapping[str, BySection] = rows_beside(__file__)["answered elsewhere"]

# Refused by a row and over HTTP, in other words: a limit, a name or advice that is of one of them.
OTHER_WORDS: BySection = rows_beside(__file__)["other words"]

# A call gives another answer: the echo of a chat is not that of its last message.
OTHER_ANSWERS: BySection = {"chats": ("an echo of what goes on",)}
