"""The flags that give prompts, and the prompts that they give."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ferrum_jax.cli.flags import json_object
from ferrum_jax.cli.parsers import add_flags
from ferrum_jax.inputs.prompt import Prompt
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ferrum_jax.engine.startup.load_request import Measure
    from ferrum_jax.tasks.texts import TextIds


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """The ways to give prompts beside arguments of their own."""
    repeated = {
        "--prompt-file FILE": "file that holds a prompt; - is standard input",
        "--token-ids IDS": "a prompt as token ids, such as '1 2 3'",
    }
    add_flags(parser, repeated, action="append", default=[])
    parser.add_argument("--chat", action="store_true", help="prompts are user messages for the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before each prompt, with --chat")
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}', with --chat",
    )
    parser.add_argument(
        "--no-add-special-tokens",
        dest="add_special_tokens",
        action="store_const",
        const=False,
        help="encode texts without the tokenizer's BOS and EOS",
    )


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    texts = list(args.prompt)
    for path in args.prompt_file:
        texts.append(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    ids = [[_token_id(token) for token in text.replace(",", " ").split()] for text in args.token_ids]
    if not texts and not ids:
        raise ValueError("there is no prompt; give PROMPT, --prompt-file FILE (- reads standard input) or --token-ids")
    for flag in ("system", "chat_template_kwargs"):
        if getattr(args, flag) is not None and not args.chat:
            raise ValueError(f"--{flag.replace('_', '-')} needs --chat")
    given = {name: getattr(args, name) for name in ("add_special_tokens", "chat_template_kwargs")}
    options = {name: value for name, value in given.items() if value is not None}
    if not args.chat:
        return [*({"prompt": text, **options} if options else text for text in texts), *ids]
    if ids:
        raise ValueError("--chat takes text; leave --token-ids out")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chats = [[*system, {"role": "user", "content": text}] for text in texts]
    return [{"messages": messages, **options} if options else messages for messages in chats]


def reach_of(prompts: Sequence[Prompt], params: SamplingParams) -> Measure:
    """The largest sizes of these prompts' steps, so that no larger ones are compiled.

    Block tables stay as wide as max_model_len, for other prompts shall find the same executables the next time.
    """
    return functools.partial(_reach_of, prompts, params)


def _reach_of(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    token_ids: TextIds,
    max_model_len: int,
) -> Reach:
    params = params.over(token_ids.generation)
    kept = params.most_prompt_tokens(max_model_len)
    lengths = [min(len(token_ids(prompt, kept=kept)), kept or max_model_len) for prompt in prompts]
    totals = [max_model_len if params.max_tokens is None else length + params.max_tokens for length in lengths]
    return Reach(num_rows=max(params.n * len(prompts), 1), num_tokens=max(params.n * sum(totals), 1))


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--token-ids holds {text!r}; give whole numbers, as in '1 2 3'")
    return int(text)
