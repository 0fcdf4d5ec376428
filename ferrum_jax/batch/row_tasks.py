"""RowTasks: what a row asks for, as a task of the model."""

from __future__ import annotations

import datetime
from typing import Any

from ferrum_jax.batch.batch_llm import RowRequest
from ferrum_jax.batch.input.formats import CLASSIFIES, EMBEDS, REWARDS, SCORES
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.prompt import take_apart
from ferrum_jax.tasks.task import Task
from ferrum_jax.tasks.task_maker import TaskMaker


class RowTasks:
    """Makes the tasks of rows that run together. now: the time of day that chat templates see."""

    def __init__(self, maker: TaskMaker, now: datetime.datetime) -> None:
        self._maker, self._now = maker, now
        self._pair = maker.pairs()

    def __call__(self, request: RowRequest) -> Task[Any]:
        """Raises ValueError for what the model cannot do."""
        maker, key = self._maker, str(request.key)
        if request.kind == EMBEDS:
            return maker.embedder.task(request.content, maker.embedder.params(), key=key)
        if request.kind == SCORES:
            return self._pair(request.content, key)
        if request.kind in (CLASSIFIES, REWARDS):
            parts = take_apart(request.content)
            make = maker.reward if request.kind == REWARDS else maker.classification
            return make(bool(parts.vector.get("truncate")))(parts, key)
        options = RequestOptions(key=key, resume=request.resume)
        return maker.completion(request.content, request.params, options, self._now, fails=True)
