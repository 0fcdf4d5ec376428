"""LoadRequest: what a user names to open an LLM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

from checkpoints import open_checkpoint
from checkpoints.hub import Show
from ferrum_jax.config import EngineConfig
from ferrum_jax.embeddings.texts import TextIds
from ferrum_jax.executables.bundle import Bundle, config_for
from ferrum_jax.sizes.engine_sizes import Reach
from ferrum_jax.sizes.speculative import asks_the_model
from ferrum_jax.spec.identity import ModelIdentity
from ferrum_jax.startup.check_attention import Rehearsal
from ferrum_jax.startup.model_source import ModelSource

Measure = Callable[[TextIds, int], Reach | None]  # see `LLM`


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What an LLM is opened from; see `LLM` for what each means. rehearsal: for tests, of the check at the start."""

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

    @classmethod
    def of_checkpoint(
        cls,
        model: str,
        config: EngineConfig | None,
        *,
        revision: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        require_bundle: bool = False,
        on_progress: Show | None = None,
        **others: Any,
    ) -> Self:
        """Raises ValueError for a checkpoint or bundle that is none."""
        opened = None if bundle is None else Bundle.open(os.fspath(bundle))
        if require_bundle and opened is None:
            raise ValueError("require_bundle is set, and no bundle is named; give bundle=DIR")
        config = config_for(config, opened)
        checkpoint = open_checkpoint(model, revision, on_progress=on_progress)
        source = ModelSource.of_checkpoint(checkpoint, mtp=asks_the_model(config.speculative_config))
        others |= {} if on_progress is None else {"on_progress": on_progress}
        source = source if config.max_image_tokens else source.for_text()
        return cls(source=source, config=config, bundle=opened, require_bundle=require_bundle, **others)
