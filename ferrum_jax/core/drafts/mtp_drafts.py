"""MtpDrafts: the token that the model's own layer predicts behind the one just drawn.

The device computes it in the same step, so it comes with the step's commit and is good for one length of the request.
There is none where a grammar has forced tokens since, or where a prompt was hit whole and nothing was computed. While a
step is in flight the draft behind its token is not known; `UNKNOWN` stands for it. Confidences are 1: how often drafts
come true is learnt by request. A request takes 100 bytes.
"""

from collections.abc import Sequence

from ferrum_jax.core.drafts.drafts import NO_DRAFT, Draft
from ferrum_jax.core.request import Request

UNKNOWN = -1  # a draft that comes with the commit of the step in flight; it is weighed and never computed
_BYTES = 100  # of a request


class MtpDrafts:
    """Drafts of one token each, as `take` was told them."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}  # by request id: tokens that it had, and the one behind them

    def take(self, request: Request, token_id: int) -> None:
        """The token predicted behind those that the request has now; UNKNOWN where nothing was computed."""
        self._told[request.id] = len(request.token_ids), token_id

    def propose(self, request: Request, most: int) -> Draft:
        """The draft that the model's own layer gave behind the last token."""
        length, token_id = self._told.get(request.id, (0, UNKNOWN))
        if most < 1 or token_id == UNKNOWN or length != len(request.token_ids):
            return NO_DRAFT
        return Draft(token_ids=(token_id,), confidences=(1.0,))

    def forget(self, request: Request) -> None:
        """Drops what was told of a request."""
        self._told.pop(request.id, None)

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None:
        """Does nothing: the model drafts for the requests that run."""

    @property
    def bytes(self) -> int:
        return _BYTES * len(self._told)
