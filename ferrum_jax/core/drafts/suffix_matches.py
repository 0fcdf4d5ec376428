"""Matches of a request's last tokens: which are the longest, and what most of them go on with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ferrum_jax.core.drafts.ngram import going_round

Match = tuple[array, int]  # the tokens of a text, and the position behind the match


def longest(matches: Sequence[Match], tokens: array[int], known: int, depth: int) -> tuple[int, list[Match]]:
    """The length of the longest match, `depth` at most, and those that have it, in order; all match `known` tokens."""
    best, kept, end = known, [], len(tokens)
    mine = tokens[end - best :]
    for match in matches:
        theirs, at = match
        if best > known and (at < best or theirs[at - best : at] != mine):
            continue
        if best < at and best < end and best < depth and theirs[at - best - 1] == tokens[end - best - 1]:
            best, kept = _common(theirs, at, tokens, best + 1, min(at, end, depth)), []
            mine = tokens[end - best :]
        kept.append(match)
    return best, kept


def _common(theirs: array[int], at: int, tokens: array[int], known: int, limit: int) -> int:
    """How many tokens before a position are those at the end of a text, `limit` at most; `known` are."""
    end = len(tokens)
    if theirs[at - limit : at] == tokens[end - limit :]:
        return limit
    while theirs[at - known - 1] == tokens[end - known - 1]:
        known += 1
    return known


def follow(matches: Sequence[Match], tokens: array[int], limit: int, min_prob: float) -> tuple[list[int], list[float]]:
    """The continuation of most matches, with their shares, while the product of shares is min_prob or more.

    A text that ends says no more; only `tokens`, the reader's own, goes on with the draft itself.
    """
    runs = [theirs[at : at + limit] for theirs, at in matches]
    for index, (theirs, at) in enumerate(matches):
        if theirs is not tokens:
            break  # the reader's own stand first
        if at + limit > len(tokens):
            runs[index] = going_round(tokens, at, limit)
    token_ids: list[int] = []
    shares: list[float] = []
    prob, num_compared = 1.0, 0
    while len(token_ids) < limit:
        step = len(token_ids)
        if len(runs) != num_compared:
            num_compared, furthest = len(runs), max(runs, key=len)
            if all(furthest[: len(run)] == run for run in runs):  # nothing is left to count
                token_ids += furthest[step:]
                return token_ids, shares + [1.0] * (len(furthest) - step)
        followed = [run[step] for run in runs if len(run) > step]
        best = max(followed, key=followed.count)  # the first of equals, which is the newest
        share = followed.count(best) / len(followed)
        prob *= share
        if prob < min_prob:
            break
        token_ids.append(best)
        shares.append(share)
        if share < 1:
            runs = [run for run in runs if len(run) > step and run[step] == best]
    return token_ids, shares
