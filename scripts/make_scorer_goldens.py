"""Makes tests/goldens/scorers/: tiny random models that score pairs of texts, and the scores of sentence-transformers.

    python -m scripts.make_scorer_goldens [--out tests/goldens/scorers] [name ...]

Needs torch, transformers and sentence-transformers (made with 2.13, 5.24 and 5.7); the test that reads the result needs
none of them. Each folder is a real checkpoint, and `golden.json` beside it holds pairs, one of them too long, and what
`CrossEncoder.predict` gives for them in float32. A model that generates is saved by sentence-transformers, with its
LogitScore; `published` holds scores of the prompt that Qwen3-Reranker's authors publish.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import sentence_transformers  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from scripts.goldens.command import run
from scripts.goldens.recipe import replace_weights
from scripts.goldens.reference import load
from scripts.goldens.weights import made
from scripts.make_encoder_goldens import SPECIAL, WORDS, Golden, law, skeleton

PAIRS = (
    ("the quick fox", "a lazy dog jumps over the brown fox"),
    ("a block", "holds the keys and values of its tokens"),
    ("tokens", "query"),
    ("query " * 20, "document values " * 15),  # cut on both sides
    ("keys", "the values of a block " * 12),  # on one
)
LONGEST = 40
_PAIR_OF_BERT = "[CLS] $A [SEP] $B:1 [SEP]:1"
_CHAT = ("<|im_start|>", "<|im_end|>", "yes", "no", "0", "4")  # digits are what the reference finds a template's end by
_TEMPLATE = """{%- for message in messages %}{{ "<|im_start|>" + message.role + "\n" + message.content }}{% endfor -%}
{{ "<|im_end|>" }}{% if add_generation_prompt %}{{ "<|im_start|>a" }}{% endif %}"""
_PUBLISHED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PAIR_OF_ROBERTA = "[CLS] $A [SEP] [SEP] $B [SEP]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerGolden(Golden):
    """pair: how the tokenizer puts two texts together. own: keys that sentence-transformers writes.

    template: a chat template, of a model that generates.
    """

    pair: str = ""
    template: str = ""
    own: dict[str, Any] = dataclasses.field(default_factory=dict)


GOLDENS = {
    "bert": ScorerGolden(
        model="BertForSequenceClassification",
        dtype="float32",
        pair=_PAIR_OF_BERT,
        config={
            "vocab_size": 60,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 76,
            "max_position_embeddings": LONGEST,
            "num_labels": 1,
        },
        own={"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}},
    ),
    "xlm_roberta": ScorerGolden(
        model="XLMRobertaForSequenceClassification",
        dtype="float32",
        pair=_PAIR_OF_ROBERTA,
        config={
            "vocab_size": 62,
            "hidden_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 52,
            "max_position_embeddings": LONGEST + 1,
            "type_vocab_size": 1,
            "pad_token_id": 0,
            "num_labels": 1,
        },
    ),
    "qwen3": ScorerGolden(
        model="Qwen3ForCausalLM",
        dtype="float32",
        template=_TEMPLATE,
        config={
            "vocab_size": 70,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 76,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
}


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    golden = GOLDENS[name]
    if golden.template:
        make_generating(golden, folder)
        return
    draw(golden, list(GOLDENS).index(name), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | golden.own, indent=2) + "\n")
    save_tokenizer(folder, golden.config["vocab_size"], golden.pair)
    model = sentence_transformers.CrossEncoder(str(made(folder)), max_length=LONGEST)
    scores = model.predict(list(PAIRS)).tolist()
    (folder / "golden.json").write_text(json.dumps({"pairs": PAIRS, "scores": scores}, indent=1) + "\n")


def draw(golden: ScorerGolden, seed: int, folder: Path) -> Any:
    """Saves the model, its weights as a recipe, and returns it."""
    like = skeleton(golden)
    like.save_pretrained(folder)
    replace_weights(folder, seed, lambda weight, shape: law(weight, shape, golden), like.all_tied_weights_keys)
    return load(like, folder, lambda tensors: tensors)


def make_generating(golden: ScorerGolden, folder: Path) -> None:
    """A folder of a model that generates, as sentence-transformers saves it, and the scores of its logits."""
    causal = draw(golden, 17, folder)
    save_tokenizer(folder, golden.config["vocab_size"], "", _CHAT)
    (folder / "chat_template.jinja").write_text(golden.template)
    model = sentence_transformers.CrossEncoder(str(made(folder)), max_length=LONGEST)
    model[0].processing_kwargs = {"chat_template": {"add_generation_prompt": True}}
    model.save_pretrained(str(folder), create_model_card=False)
    (folder / "model.safetensors").unlink()  # they stand in the recipe
    scores = model.predict(list(PAIRS)).tolist()
    told = model.predict(list(PAIRS[:3]), prompt="the quick answer").tolist()
    true_id, false_id = (model.tokenizer.convert_tokens_to_ids(text) for text in ("yes", "no"))
    published = []
    for query, document in PAIRS[:3]:
        text = _PUBLISHED.format(instruction=_INSTRUCTION, query=query, document=document)
        ids = model.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
        with torch.no_grad():
            logits = causal(torch.tensor([ids])).logits[0, -1]
        published.append(float(torch.sigmoid(logits[true_id] - logits[false_id])))
    found = {"pairs": PAIRS, "scores": scores, "told": told, "published": published}
    (folder / "golden.json").write_text(json.dumps(found, indent=1) + "\n")


def save_tokenizer(folder: Path, vocab_size: int, pair: str, more: tuple[str, ...] = ()) -> None:
    """A WordPiece tokenizer, which says how two texts stand together. more: words, those in <> are special tokens."""
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*SPECIAL, *WORDS, *"bcefghijlmnpqrstuvwxyz", *more]))}
    assert len(vocab) <= vocab_size
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([*SPECIAL, *(name for name in more if name[0] == "<")])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if pair:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pair, special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    run(__doc__, GOLDENS, "tests/goldens/scorers", make)
