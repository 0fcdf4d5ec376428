"""Arguments of the Python API: unknown ones are refused with what there is, and vLLM's names are taken beside ours."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, ParamSpec, TypeVar

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import ToolsAsked, tools_asked
from ferrum_jax.inputs.prompt import Prompt, single, with_adapter
from ferrum_jax.io.ints import as_whole
from ferrum_jax.sampling_params import SamplingParams

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Asked = TypeVar("Asked", SamplingParams, SamplingParams | Sequence[SamplingParams])


def checked(method: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """The method; a keyword that it does not have raises TypeError, which names those that it has."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError(_refusal(method.__qualname__, unknown[0], known))
        return method(*args, **kwargs)

    return call


def require_one(prompt: Any, verb: str) -> None:
    """Raises ValueError for several prompts of a call of AsyncLLM that takes one."""
    if not single(prompt) and isinstance(prompt, Sequence) and len(prompt) > 1:
        raise ValueError(
            f"AsyncLLM.{verb} takes one prompt, and {len(prompt)} are given; make one call for each, side by side"
        )


class MissingMethod:
    """A method that vLLM has; asking for it raises AttributeError, which says what to use instead."""

    def __init__(self, instead: str) -> None:
        self._instead, self._name = instead, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}, a method of vLLM's: {self._instead}")


ENCODE = MissingMethod("embed gives vectors, classify classes, reward rewards and score scores of pairs")
BEAM_SEARCH = MissingMethod("ask generate for n choices with logprobs and keep the best")
GET_METRICS = MissingMethod("stats() has the counters")


def _refusal(method: str, name: str, known: list[str]) -> str:
    meant = get_close_matches(name, known, n=1)
    hint = f" (did you mean {meant[0]}?)" if meant else ""
    where = "; what the chat template reads goes into chat_template_kwargs" if "chat_template_kwargs" in known else ""
    return f"{method} has no argument {name}{hint}; it has {', '.join(known)}{where}"


def shown(progress: bool | None, use_tqdm: bool | None) -> bool | None:
    """Whether a bar is asked for, by either name. Raises ValueError where they differ."""
    if progress is not None and use_tqdm is not None and progress != use_tqdm:
        raise ValueError(f"progress is {progress} and use_tqdm, its name in vLLM, is {use_tqdm}; give one of them")
    return use_tqdm if progress is None else progress


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    """The parameters of each prompt, of one for all or one each. Raises ValueError for what is neither."""
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError(f"sampling_params is {params!r}; it must be SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each")
    return params


def with_tools(params: Asked, tools: object, tool_choice: object, parallel: object) -> Asked:
    """The parameters under which the calls that `LLM.chat` demands must come.

    Tools that need not be called may look as the template likes. Raises ValueError where they ask for other structure.
    """
    is_free = tool_choice in (None, "auto", "none") and parallel is None
    demanded = None if is_free else tools_asked(tools, tool_choice, parallel)
    return params if demanded is None else _demanding(params, demanded)


def _demanding(params: Any, tools: ToolsAsked) -> Any:
    if not isinstance(params, SamplingParams):
        return [_demanding(one, tools) for one in params]
    if params.structured_outputs is not None:
        raise ValueError("tool_choice demands a call, and structured_outputs asks for something else; give one of them")
    return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(tools=tools))


def priorities_for(prompts: Sequence[Prompt], priority: Sequence[int] | None) -> Sequence[int]:
    """The priority of each prompt; None is 0 for all. Raises ValueError unless it is a list of one number for each."""
    if priority is None:
        return [0] * len(prompts)
    if isinstance(priority, str) or not isinstance(priority, Sequence) or len(priority) != len(prompts):
        raise ValueError(f"priority is {priority!r}; it must be a list with one whole number for each prompt")
    priority = [*map(as_whole, priority)]
    wrong = next((p for p in priority if isinstance(p, bool) or not isinstance(p, int)), None)
    if wrong is not None:
        raise ValueError(f"priority holds {wrong!r}; each must be a whole number, lower runs first")
    return priority


def with_adapters(prompts: list[Any], adapter: str | Sequence[str | None] | None) -> list[Any]:
    """The prompts with the adapters that they name. adapter: for all, or one each; None leaves a prompt as it is.

    Raises ValueError where there is not one for each.
    """
    if adapter is None:
        return prompts
    names = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
    if len(names) != len(prompts):
        raise ValueError(f"{len(names)} adapters are given for {len(prompts)} prompts; give one, or one each")
    return [with_adapter(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
