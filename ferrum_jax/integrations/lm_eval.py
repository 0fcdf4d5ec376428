"""lm-eval's model over an `LLM`: log-likelihoods by one prefill each, greedy text until a stop. Extra: `eval`.

    import ferrum_jax.integrations.lm_eval                       # gives the model its name
    lm_eval.simple_evaluate("ferrum-jax", model_args="pretrained=checkpoints/demo,max_model_len=512", tasks=[...])

A context and what follows are tokenised together and cut where the context's own tokens end, as `hf` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-not-found]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]

from ferrum_jax.llm import LLM
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.tokenizer import Tokenizer

_MAX_TOKENS = 256  # generated where a task does not say how many, as lm-eval's own models do
_KNOWN = ("until", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k", "seed")
Pair = tuple[tuple[str, str], list[int], list[int]]  # the texts, and token ids of a context and what follows


@register_model("ferrum-jax")
class FerrumJaxLM(TemplateLM):
    """Answers a task's requests with an engine; `LLM` gives weights, tokenizer and chat template."""

    def __init__(self, pretrained: str | LLM, add_bos_token: bool | None = None, **fields: Any) -> None:
        """pretrained: a folder, a model of the hub, or an open LLM. add_bos_token: None follows the tokenizer.

        fields: of `LLM` and EngineConfig. batch_size, max_batch_size and device, which lm-eval gives every model, mean
        nothing here: an engine batches by itself. Raises ValueError for a model without tokenizer.
        """
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):
            fields.pop(name, None)
        if isinstance(pretrained, LLM) and fields:
            raise ValueError(
                f"{', '.join(sorted(fields))} is given beside an open LLM, which has its own; leave it out"
            )
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **fields)
        self._texts: Tokenizer = self.llm.get_tokenizer()
        self._adds_bos = add_bos_token

    @property
    def eot_token_id(self) -> int:
        """The end of a text, as the tokenizer has it, or the first end token of the model."""
        eos = self._texts.eos_id
        return min(self.llm.loaded.end_ids) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the tokenizer's first of every text, or else its end token."""
        bos = self._texts.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's key for requests that it caches."""
        return str(self.llm.model.folder).replace("/", "__")

    @property
    def max_length(self) -> int:
        """Most tokens before the one that is scored last."""
        return self.llm.max_model_len - 1

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        adds = self._adds_bos if add_special_tokens is None else add_special_tokens
        return self._texts.encode(string, add_special_tokens=True if adds is None else adds)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        return self.llm.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of what follows, whether it is the greedy text); long contexts lose their beginning."""
        cut = [_fitted(context, rest, self.llm.max_model_len) for _, context, rest in requests]
        found = self.llm.compute_logprobs(
            [context for context, _ in cut], [rest for _, rest in cut], progress=False if disable_tqdm else None
        )
        answers = [(scores.cumulative_logprob, bool((scores.ranks == 1).all())) for scores in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's length."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        pairs: list[Pair] = [(("", ""), context, rest) for parts in windows for context, rest in parts]
        found = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        return [sum(next(found)[0] for _ in parts) for parts in windows]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        return map(
            make_disjoint_window,
            get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ),
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first stop."""
        asked = [request.args for request in requests]
        params = [_sampling(dict(options), self.llm.max_model_len - 1) for _, options in asked]
        prompts = []
        for (context, _), one in zip(asked, params, strict=True):
            room = self.llm.max_model_len - (one.max_tokens or 1)
            prompts.append(self.tok_encode(context)[-max(room, 1) :])
        outputs = self.llm.generate(prompts, params, progress=False if disable_tqdm else None)
        for request, output in zip(asked, outputs, strict=True):
            self.cache_hook.add_partial("generate_until", request, output.text)
        return [output.text for output in outputs]


def _fitted(context: list[int], rest: list[int], most: int) -> tuple[list[int], list[int]]:
    """Both, with the beginning of the context cut off where they are longer than `most` together.

    Raises ValueError where what follows leaves no room for a token before it.
    """
    if len(rest) >= most:
        raise ValueError(f"a continuation has {len(rest)} tokens, and a sequence at most {most}; raise max_model_len")
    return context[-(most - len(rest)) :], rest


def _sampling(options: dict[str, Any], most: int) -> SamplingParams:
    """The parameters of a task's generation, of at most so many tokens. Raises ValueError for unknown ones."""
    known = normalize_gen_kwargs(options, _MAX_TOKENS)
    unknown = sorted(set(known) - set(_KNOWN))
    if unknown:
        raise ValueError(f"the task's generation_kwargs have {unknown}; known are {_KNOWN}")
    return SamplingParams(
        max_tokens=min(known["max_gen_toks"], most),
        temperature=known.get("temperature", 1.0) if known.get("do_sample") else 0.0,
        top_p=known.get("top_p", 1.0),
        top_k=known.get("top_k", 0),
        seed=known.get("seed"),
        stop=[stop for stop in known.get("until") or () if stop],
    )
