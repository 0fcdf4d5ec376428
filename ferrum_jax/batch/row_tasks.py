"""RowTasks: what a row asks for, as a task of the model."""

import datetime
from typing import Any

from ferrum_jax.batch.batch_llm import RowRequest
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.openai.asked import GENERATES, TRANSCRIBES
from ferrum_jax.tasks.reading import ReadingTasks
from ferrum_jax.tasks.task import Task
from ferrum_jax.tasks.task_maker import TaskMaker


class RowTasks:
    """Makes the tasks of rows that run together. now: the time of day that chat templates see."""

    def __init__(self, maker: TaskMaker, now: datetime.datetime) -> None:
        self._maker, self._now, self._read = maker, now, ReadingTasks(maker)

    def __call__(self, request: RowRequest) -> Task[Any]:
        """Raises ValueError for what the model cannot do."""
        key = str(request.key)
        if request.kind not in (GENERATES, TRANSCRIBES):
            return self._read(request.kind, request.content, key)
        options = RequestOptions(key=key, resume=request.resume)
        return self._maker.completion(request.content, request.params, options, self._now, fails=True)
