"""The flags that give prompts, and the prompts that they give."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ferrum_jax.config import Reach
from ferrum_jax.prompt import Content, Prompt, take_apart
from ferrum_jax.request import SamplingParams

if TYPE_CHECKING:
    from ferrum_jax.llm import Measure


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """The ways to give prompts beside arguments of their own."""
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file that holds a prompt; - is standard input",
    )
    parser.add_argument(
        "--token-ids", action="append", default=[], metavar="IDS", help="a prompt as token ids, such as '1 2 3'"
    )
    parser.add_argument("--chat", action="store_true", help="prompts are user messages for the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before each prompt, with --chat")


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    texts = list(args.prompt)
    for path in args.prompt_file:
        texts.append(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    ids = [[_token_id(token) for token in text.replace(",", " ").split()] for text in args.token_ids]
    if not texts and not ids:
        raise ValueError("there is no prompt; give PROMPT, --prompt-file FILE (- reads standard input) or --token-ids")
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat")
    if not args.chat:
        return [*texts, *ids]
    if ids:
        raise ValueError("--chat takes text; leave --token-ids out")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [[*system, {"role": "user", "content": text}] for text in texts]


def reach_of(prompts: Sequence[Prompt], params: SamplingParams) -> Measure:
    """What the steps of these prompts can reach, so that nothing else is compiled for them.

    Block tables stay as wide as max_model_len, for other prompts shall find the same executables the next time.
    """
    return functools.partial(_reach_of, prompts, params)


def _reach_of(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    token_ids: Callable[[Content], Sequence[int]],
    max_model_len: int,
) -> Reach:
    lengths = [len(token_ids(take_apart(prompt).content)) for prompt in prompts]
    totals = [max_model_len if params.max_tokens is None else length + params.max_tokens for length in lengths]
    return Reach(num_rows=max(params.n * len(prompts), 1), num_tokens=max(params.n * sum(totals), 1))


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--token-ids holds {text!r}; give whole numbers, as in '1 2 3'")
    return int(text)
