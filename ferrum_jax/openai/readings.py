"""Bodies of texts that are read: what is asked of each text or pair, and the answer that the outputs become."""

from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.core.outputs import ClassOutput, EmbeddingOutput, RewardOutput, ScoreOutput
from ferrum_jax.openai.answers import classes_answer, ranking, read_usage, rewards_answer, vectors_answer
from ferrum_jax.openai.asked import AskedClasses, AskedRewards, AskedScores, AskedVectors
from ferrum_jax.openai.bodies import named_content
from ferrum_jax.openai.logprob_forms import number

AskedReading = AskedVectors | AskedScores | AskedClasses | AskedRewards
ReadingOutput = EmbeddingOutput | ScoreOutput | ClassOutput | RewardOutput


def contents_of(asked: AskedReading) -> list[dict[str, Any]]:
    """Each text or pair with what belongs to it, as JSON has it: a prompt, or a pair of `LLM.score`."""
    if not isinstance(asked, AskedScores):
        return [{**named_content(each), **asked.options} for each in asked.prompts]
    more = {**asked.options, **({"ranks": True} if asked.ranks else {})}
    found = [{"query": one, "document": other, **more} for one, other in asked.pairs]
    for each in found[1:] if len(asked.left) == 1 else ():
        each["query_counts"] = False
    return found


def with_salt(content: Mapping[str, Any], salt: str) -> Mapping[str, Any]:
    """A content whose prefixes only prompts of this salt share; "" leaves it as it is."""
    return {**content, "cache_salt": salt} if salt else content


def num_read(outputs: Sequence[ReadingOutput]) -> int:
    """The tokens of all texts."""
    return sum([len(output.prompt_token_ids) for output in outputs])


def reading_answer(
    asked: AskedReading, outputs: Sequence[Any], head: Mapping[str, Any], documents: Sequence[str]
) -> dict[str, Any]:
    """The body of an answer. head: the model, and what else the door tells. documents: of a ranking, in their order.

    Raises ValueError where more dimensions are asked for than vectors have.
    """
    num_tokens = num_read(outputs)
    if isinstance(asked, AskedVectors):
        vectors = [output.cut(asked.form.dimensions) for output in outputs]
        return vectors_answer(vectors, num_tokens, head, as_base64=asked.form.as_base64)
    if isinstance(asked, AskedClasses):
        return classes_answer([(output.label, output.probs) for output in outputs], num_tokens, head)
    if isinstance(asked, AskedRewards):
        return rewards_answer([output.reward for output in outputs], num_tokens, head)
    scores = [number(output.score) for output in outputs]
    if asked.ranks:
        shown = documents if asked.form.shows_documents else None
        answer: dict[str, Any] = {"results": ranking(scores, asked.form.top_n, shown)}
    else:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        answer = {"object": "list", "data": data}
    return {**answer, **head, "usage": read_usage(num_tokens)}
