"""ReadingTasks: what a body asks of texts that are only read, as tasks: vectors, scores, classes, rewards."""

from typing import Any

from ferrum_jax.inputs.prompt import take_apart
from ferrum_jax.openai.asked import CLASSIFIES, EMBEDS, REWARDS, SCORES
from ferrum_jax.tasks.task import Task
from ferrum_jax.tasks.task_maker import TaskMaker


class ReadingTasks:
    """Makes the tasks of one model's readings; any thread may ask."""

    def __init__(self, maker: TaskMaker) -> None:
        self._maker, self._pair = maker, maker.pairs()

    def __call__(self, kind: int, content: Any, key: str = "") -> Task[Any]:
        """The task of one of `openai.readings.contents_of`. Raises ValueError for what the model cannot do."""
        maker = self._maker
        if kind == EMBEDS:
            return maker.embedder.task(content, maker.embedder.params(), key=key)
        if kind == SCORES:
            return self._pair(content, key)
        assert kind in (CLASSIFIES, REWARDS), f"no text is read for {kind}"
        parts = take_apart(content)
        make = maker.reward if kind == REWARDS else maker.classification
        return make(bool(parts.vector.get("truncate")))(parts, key)
