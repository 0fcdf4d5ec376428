"""Tiny checkpoints that hear in prompts: a tokenizer of characters, a processor's file and a chat template."""

import json
import shutil
from pathlib import Path

from scripts.goldens.video_folder import SOUND_TOKENS, write_tokenizer

PLACE = f"{SOUND_TOKENS[2]}{SOUND_TOKENS[0]}{SOUND_TOKENS[3]}"
_PROCESSOR = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 10}


def write_folder(goldens: Path, folder: Path, name: str = "qwen3_asr") -> Path:
    """The weights of a golden, and what turns texts and sounds into prompts."""
    shutil.copytree(goldens / "hearing" / name, folder)
    write_tokenizer(folder / "tokenizer.json", name)
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    template += f"{{% if p.type == 'audio' %}}{PLACE}{{% endif %}}"
    template += "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder
