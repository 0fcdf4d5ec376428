"""LoadRequest: what a user names to open an LLM."""

import dataclasses
from collections.abc import Callable, Mapping

from checkpoints.hub import Show
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.check_attention import Rehearsal
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.runtime.compile.bundle import Bundle
from ferrum_jax.tasks.texts import TextIds

Measure = Callable[[TextIds, int], Reach | None]  # see `LLM`


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A request to open an LLM; see `LLM` for each field. rehearsal: for tests, of the check at the start."""

    source: ModelSource
    config: EngineConfig
    tokenizer: str | None = None
    bundle: Bundle | None = None
    require_bundle: bool = False
    reach: Measure | None = None
    on_progress: Show = lambda what, done, total: None
    on_problem: Callable[[str], None] = lambda text: None
    on_identity: Callable[[ModelIdentity], None] = lambda identity: None
    begun_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rehearsal: Rehearsal | None = None
