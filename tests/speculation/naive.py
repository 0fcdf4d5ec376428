"""What drafts are by definition, searched for through all texts each time."""

import dataclasses
from array import array
from collections import Counter
from collections.abc import Sequence

from ferrum_jax.core.drafts.suffix import GRAMS, MAX_PLACES
from ferrum_jax.core.request import Request


def request_of(id: int, tokens: Sequence[int], *, num_prompt: int | None = None, salt: bytes = b"") -> Request:
    """A request with tokens, all of its prompt unless said otherwise."""
    count = len(tokens) if num_prompt is None else num_prompt
    ids = array("i", tokens)
    return Request(id=id, token_ids=ids, num_prompt_tokens=count, max_total_tokens=10_000, cache_salt=salt)


def naive_ngram(tokens: Sequence[int], least: int, longest: int, most: int) -> list[int]:
    tokens = list(tokens)
    for n in range(longest, least - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                return _going_on(tokens, place, most)
    return []


def _going_on(tokens: list[int], place: int, most: int) -> list[int]:
    grown = list(tokens)
    while len(grown) < len(tokens) + most:
        grown.append(grown[place + len(grown) - len(tokens)])
    return grown[len(tokens) :]


@dataclasses.dataclass(eq=False)
class Text:
    tokens: Sequence[int]
    num_prompt: int
    salt: bytes
    taken: int = 0


class NaiveSuffix:
    """SuffixDrafts with lists, and a search through all of them."""

    def __init__(self, depth: int, max_texts: int, factor: float, min_prob: float, *, max_tokens: int, places: int):
        self.depth, self.factor, self.min_prob = depth, factor, min_prob
        self.max_texts, self.max_tokens, self.places = max_texts, max_tokens, places
        self.running: dict[int, Text] = {}
        self.finished: list[Text] = []
        self.shared: list[tuple[Text, int]] = []  # the positions that may be read, as they came

    def propose(self, request: Request, most: int) -> tuple[list[int], list[float]]:
        mine = self._taken_in(request)
        tokens = list(mine.tokens)
        known = {*self.finished, *self.running.values()}
        shared = [
            (text, at)
            for text, at in reversed(self.shared[-self.places :])
            if text in known and text is not mine and text.salt == mine.salt
        ]
        own = [(mine, at) for at in range(len(tokens) - 1, 0, -1)]
        for n in reversed([n for n in GRAMS if n <= min(self.depth, len(tokens))]):
            matches = [m for m in own if self._match(m, tokens) >= n][:MAX_PLACES]
            matches += [m for m in shared if self._match(m, tokens) >= n][:MAX_PLACES]
            if matches:
                length = max(self._match(m, tokens) for m in matches)
                kept = [m for m in matches if self._match(m, tokens) == length]
                return self._follow(kept, mine, min(most, int(self.factor * length)))
        return [], []

    def _match(self, match: tuple[Text, int], tokens: list[int]) -> int:
        text, at = match
        length = 0
        while length < min(at, len(tokens), self.depth) and text.tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _follow(self, matches: list[tuple[Text, int]], mine: Text, limit: int) -> tuple[list[int], list[float]]:
        draft: list[int] = []
        shares: list[float] = []
        prob = 1.0
        while len(draft) < limit:
            ahead = []
            for text, at in matches:
                tokens = [*text.tokens, *(draft if text is mine else ())]
                if at + len(draft) < len(tokens):
                    ahead.append((tokens[at + len(draft)], (text, at)))
            if not ahead:
                break
            counts = Counter(token for token, _ in ahead)
            best = next(token for token, _ in ahead if counts[token] == max(counts.values()))
            prob *= counts[best] / len(ahead)
            if prob < self.min_prob:
                break
            draft.append(best)
            shares.append(counts[best] / len(ahead))
            matches = [match for token, match in ahead if token == best]
        return draft, shares

    def forget(self, request: Request) -> None:
        self._finish(self._taken_in(request))
        del self.running[request.id]

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None:
        text = Text(token_ids, num_prompt_tokens, salt)
        self._take_in(text)
        self._finish(text)

    def _taken_in(self, request: Request) -> Text:
        new = Text(request.token_ids, request.num_prompt_tokens, request.cache_salt)
        text = self.running.setdefault(request.id, new)
        self._take_in(text)
        return text

    def _take_in(self, text: Text) -> None:
        start = max(text.taken, text.num_prompt, 1)
        self.shared += [(text, at) for at in range(start, len(text.tokens))]
        text.taken = len(text.tokens)

    def _finish(self, text: Text) -> None:
        if len(text.tokens) > self.max_tokens:
            return
        self.shared += [(text, at) for at in range(1, min(text.num_prompt, len(text.tokens)))]
        self.finished.append(text)
        while len(self.finished) > self.max_texts or sum(len(t.tokens) for t in self.finished) > self.max_tokens:
            self.finished.pop(0)
