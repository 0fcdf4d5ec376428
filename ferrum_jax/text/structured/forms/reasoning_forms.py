"""The table of forms in which models write their reasoning; the reasons for its shape are those of `tool_forms.py`."""

import dataclasses

from ferrum_jax.text.structured.forms.tool_forms import Spellings, shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningForm:
    """Between which texts a model thinks. answer: the texts around its answer, where there are some.

    marks, vllm and several spellings: as of a ToolForm. has_channels: the whole message is one of harmony's.
    """

    name: str
    begin: Spellings
    end: Spellings
    marks: tuple[tuple[str, ...], ...]
    answer: tuple[str, str] | None = None
    has_channels: bool = False
    vllm: tuple[str, ...] = ()


REASONING_FORMS = (
    ReasoningForm(
        name="harmony",
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        marks=(("<|channel|>", "<|constrain|>"), ("<|channel|>", "<|message|>")),
        has_channels=True,
        vllm=("openai_gptoss", "gpt-oss", "gpt_oss"),
    ),
    ReasoningForm(name="mistral", begin="[THINK]", end="[/THINK]", marks=(("[THINK]",),)),
    ReasoningForm(name="seed_oss", begin="<seed:think>", end="</seed:think>", marks=(("</seed:think>",),)),
    ReasoningForm(
        name="gemma4",
        begin=("<|channel>thought\n", "<|channel>"),
        end="<channel|>",
        marks=(("<channel|>",),),
    ),
    ReasoningForm(
        name="command",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        marks=(("<|END_THINKING|>",),),
        vllm=("cohere_command3", "cohere_command4", "cohere"),
    ),
    ReasoningForm(
        name="granite",
        begin=("Here is my thought process:", "Here's my thought process:"),
        end=("Here is my response:", "Here's my response:"),
        marks=(("Here is my thought process:",), ("Here's my thought process:",)),
    ),
    ReasoningForm(
        name="granite_3.3",
        begin="<think>",
        end="</think>",
        answer=("<response>", "</response>"),
        marks=(("</think>", "</response>"),),
    ),
    ReasoningForm(
        name="hunyuan_a13b",
        begin="<think>",
        end="</think>",
        answer=("<answer>", "</answer>"),
        marks=(("</think>", "<answer>"), ("</think>", "<tool_calls>")),
    ),
    ReasoningForm(
        name="think",
        begin="<think>",
        end="</think>",
        marks=(("</think>",),),
        vllm=(
            "deepseek_r1",
            "deepseek_v3",
            "qwen3",
            "glm45",
            "glm47",
            "kimi_k2",
            "minimax_m2",
            "olmo3",
            "nemotron_v3",
            "mimo",
            "ernie45",
            "holo2",
            "step3",
        ),
    ),
)


def reasoning_form(template: str | None) -> ReasoningForm | None:
    """The form of a chat template's reasoning, or None."""
    return next((form for form in REASONING_FORMS if template and shows(template, form.marks)), None)


def reasoning_form_named(name: str) -> ReasoningForm:
    """The form of that name, ours or vLLM's. Raises ValueError naming those that there are."""
    found = next((form for form in REASONING_FORMS if name in (form.name, *form.vllm)), None)
    if found is None:
        known = ", ".join(each for form in REASONING_FORMS for each in (form.name, *form.vllm))
        raise ValueError(f"no form of reasoning is named {name[:80]!r}; there are {known}")
    return found
