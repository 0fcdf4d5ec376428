"""Constraints: what an engine's choices are held to, and the masks of the rows that draw under some.

A choice with a grammar has a matcher, which is fed each token as its step is committed. Between the forward of the next
step and its sampling, the masks of the rows that draw there are made in threads and written to the pool. So a row waits
for its own token alone, while the device runs the forward.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ferrum_jax.core.plan import StepPlan
from ferrum_jax.core.request import Request
from ferrum_jax.engine.submission import Choice
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.structured.grammars import Grammar, Grammars
from ferrum_jax.text.structured.matcher import Matcher, all_forced, fill_all
from ferrum_jax.text.structured.reading.message_stream import PROMPT_END_TOKENS, MessageForms
from ferrum_jax.text.structured.token_rules import allow, forbid
from ferrum_jax.text.structured.vocabulary import Vocabulary
from ferrum_jax.text.tokenizer import Tokenizer


class Constraints:
    """The grammars of one engine; its vocabulary is made when the first of them comes."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, end_ids: frozenset[int], forms: MessageForms
    ) -> None:
        """forms: in which the model writes calls and reasoning."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self.forms = forms
        self._made: Grammars | None = None
        self._matchers: dict[int, Matcher] = {}  # by request id
        self._faults: dict[int, dict[int, str]] = {}  # by request id: why it goes no further than so many tokens
        self._all = np.zeros(ceil_div(vocab_size, 32), np.int32)  # a mask of all the model's tokens
        allow(self._all, range(vocab_size))
        self._num_masks = self._num_forced = 0

    def grammar(self, sampling: SamplingParams) -> Grammar | None:
        """The grammar that is asked for; its compile has begun. Raises ValueError where there can be none."""
        asked = sampling.structured_outputs
        return None if asked is None else self._grammars.get(asked)

    @property
    def _grammars(self) -> Grammars:
        if self._made is None:
            if self._tokenizer is None:
                raise ValueError("structured_outputs needs a tokenizer; leave it out, or give LLM(tokenizer=...)")
            vocabulary = Vocabulary(self._tokenizer, vocab_size=self._vocab_size, end_ids=self._end_ids)
            self._made = Grammars(vocabulary, self.forms.tools)
        return self._made

    def advance(self, choice: Choice, token: int) -> str | None:
        """Feeds a choice its last token; why it can go no further, None where it can."""
        request = choice.request
        fault = self._faults.get(request.id, {}).get(len(request.token_ids) - 1)
        if fault is not None or choice.submission.grammar is None:
            return fault
        matcher = self._matcher(choice)
        matcher.advance(token)
        return matcher.error

    def beginning(self, choice: Choice) -> list[int]:
        """The tokens that a choice without tokens must begin with, below its limit."""
        grammar = choice.submission.grammar
        if grammar is None or choice.stops is not None or not self._may_force(choice):
            return []
        if self._begins_after(choice.submission.prompt_token_ids):
            return []
        request = choice.request
        fitting = itertools.takewhile(lambda token: token not in request.stop_ids, grammar.beginning)
        found = list(itertools.islice(fitting, self._room(request)))
        self._num_forced += len(found)
        return found

    def forced(self, choice: Choice) -> list[int]:
        """The tokens that must come after those of a choice, below its limit.

        A function of its tokens alone: neither preemption nor a restart nor the order of steps changes which they are.
        """
        if choice.submission.grammar is None or not self._may_force(choice):
            return []
        matcher, request = self._matcher(choice, next_token=True), choice.request
        found = all_forced(matcher, self._room(request), request.stop_ids)
        self._num_forced += len(found)
        return found

    def _may_force(self, choice: Choice) -> bool:
        """Whether tokens that are not drawn may come: nothing is asked of each token, or forbidden."""
        sampling, rules = choice.submission.sampling, choice.submission.rules
        asks = sampling.logprobs is not None or sampling.scores_prompt or choice.masks is not None
        return not asks and rules is not None and rules.say_nothing

    def _room(self, request: Request) -> int:
        """How many tokens may be forced: the request's last one is drawn."""
        return max(0, request.max_total_tokens - 1 - len(request.token_ids))

    def masks_of(
        self, plan: StepPlan, choice_at: Callable[[int, int], Choice]
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """For each shard the ids of the masks under which its rows draw at their places, and the masks.

        choice_at: who has a slot of a shard.
        """
        ids, masks = [], []
        for index, shard in enumerate(plan.shards):
            open_, drafts, own = [], [], []
            mask_ids, first = shard.mask_ids, shard.first_places
            for row in np.flatnonzero((shard.samples > 0) & shard.masked).tolist():
                choice, drafted = choice_at(index, int(shard.slots[row])), shard.drafts_of(row)
                place = int(shard.starts[row] + shard.counts[row]) - len(drafted)
                if choice.request.finish_reason is None and place == len(choice.request.token_ids):  # else forced now
                    open_.append(choice)
                    drafts.append(drafted)
                    own += mask_ids[first[row] : first[row] + 1 + len(drafted)].tolist()
            ids.append(own)
            masks.append(self.masks(open_, drafts))
        return ids, masks

    def masks(self, choices: Sequence[Choice], drafts: Sequence[Sequence[int]] = ()) -> np.ndarray:
        """[places, words] int32: the tokens that may come next in each choice, and behind each of its drafted tokens.

        Where none may, all do: the choice ends with an error when its token comes.
        """
        found: list[np.ndarray] = []
        firsts, behind = self._filled(choices), drafts or [()] * len(choices)
        for choice, mask, drafted in zip(choices, firsts, behind, strict=True):
            self._faults[choice.request.id] = {}
            self._narrow(mask, choice, self._matchers.get(choice.request.id), ())
            found.append(mask[None])
            if drafted:
                found.append(self._behind(choice, drafted))
        masks = np.concatenate(found) if found else firsts
        self._num_masks += len(masks)
        return masks

    def _behind(self, choice: Choice, drafts: Sequence[int]) -> np.ndarray:
        """[drafts, words]: the masks behind drafted tokens of a choice; all may come where its grammar ends."""
        masks = np.tile(self._all, (len(drafts), 1))
        own = self._matchers.get(choice.request.id)
        matcher = own and own.copy()
        for place, (token, mask) in enumerate(zip(drafts, masks, strict=True), 1):
            if matcher is not None and not self._advance_and_fill(matcher, token, mask):
                break  # it is never drawn, or what it leads to is an error
            self._narrow(mask, choice, matcher, drafts[:place])
        return masks

    def _advance_and_fill(self, matcher: Matcher, token: int, mask: np.ndarray) -> bool:
        """Whether the grammar takes the token; the mask is that of the token behind it."""
        if not matcher.advance(token):
            return False
        if matcher.has_begun:
            matcher.fill(mask)
        else:
            forbid(mask, self._end_ids)
        return True

    def _filled(self, choices: Sequence[Choice]) -> np.ndarray:
        """The masks of the grammars: before one begins, all but the end tokens may come."""
        held = {
            row: self._matcher(choice, next_token=True)
            for row, choice in enumerate(choices)
            if choice.submission.grammar is not None
        }
        begun = {row: matcher for row, matcher in held.items() if matcher.has_begun}
        made = np.empty((len(begun), len(self._all)), np.int32)
        if begun:
            fill_all(self._grammars.vocabulary, list(begun.values()), made)
        if len(begun) == len(choices):
            return made
        masks = np.tile(self._all, (len(choices), 1))
        masks[list(begun)] = made
        for row in held.keys() - begun.keys():
            forbid(masks[row], self._end_ids)
        return masks

    def _narrow(self, mask: np.ndarray, choice: Choice, matcher: Matcher | None, drafts: Sequence[int]) -> None:
        """Takes out what the request itself forbids behind its tokens and these.

        Where that leaves nothing, notes why the choice goes no further than there.
        """
        request, rules = choice.request, choice.submission.rules
        assert rules is not None
        fault = matcher and matcher.error
        if fault is None and not rules.say_nothing:
            fault = rules.narrow(mask, [*request.token_ids[request.num_prompt_tokens :], *drafts])
        if fault is not None:
            self._faults[request.id][len(request.token_ids) + len(drafts)] = fault
            mask[:] = self._all

    def allowed(self, choice: Choice, token_ids: Sequence[int]) -> int:
        """How many of the first tokens a choice's grammar allows behind those that it has."""
        if choice.submission.grammar is None:
            return len(token_ids)
        return self._matcher(choice, next_token=True).num_allowed(token_ids)

    def _matcher(self, choice: Choice, *, next_token: bool = False) -> Matcher:
        """The choice's own; one that begins, or goes on from another process, is fed the tokens that it has."""
        request = choice.request
        matcher = self._matchers.get(request.id)
        if matcher is None:
            assert choice.submission.grammar is not None
            before = request.token_ids[request.num_prompt_tokens :]
            before = before if next_token else before[:-1]
            after = self._begins_after(choice.submission.prompt_token_ids)
            matcher = choice.submission.grammar.matcher(before, begins_after=after, forces=self._may_force(choice))
            self._matchers[request.id] = matcher
        return matcher

    def _begins_after(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The tokens after which the grammar begins: those that end the thinking which the prompt has opened."""
        thought_end, tokenizer = self.forms.thought_end, self._tokenizer
        if thought_end is None or tokenizer is None:
            return []
        end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        is_open = self.forms.is_open_after(end)
        return tokenizer.encode(thought_end, add_special_tokens=False) if is_open else []

    def forget(self, choice: Choice) -> None:
        """The choice has ended."""
        self._matchers.pop(choice.request.id, None)
        self._faults.pop(choice.request.id, None)

    def counts(self) -> dict[str, int]:
        """Counts so far."""
        made = self._made
        return {
            "grammars": 0 if made is None else made.num_compiled,
            "grammar_hits": 0 if made is None else made.num_hits,
            "masks": self._num_masks,
            "forced_tokens": self._num_forced,
        }
