"""A checkpoint folder on disk or behind a URL: its kind, its configuration and its weights."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax

from checkpoints import hub, huggingface, orbax_folder
from checkpoints.adapters.lora import WEIGHTS, Adapter, take_apart
from checkpoints.adapters.peft_config import CONFIG, AdapterConfig
from checkpoints.formats import Scheme, StoredForms, said_of_forms, scheme_of, stored_scale_dtype
from checkpoints.remote import RemoteFolder
from checkpoints.rules import CLASSES, HEAD, MISTRALS_HEAD, Expansion, Rule, Shape, saved_alone
from ferrum_jax.io.files.json_files import read_json, read_optional_json
from ferrum_jax.io.paths import is_url


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder that was recognised; the weights stay on disk until `load`."""

    kind: Literal["huggingface", "orbax"]
    path: Path  # if it is remote, local copies of all files but the weights
    config: dict[str, Any]  # config.json
    generation_config: dict[str, Any]  # generation_config.json, {} when there is none
    remote: RemoteFolder | None = None

    @property
    def has_head(self) -> bool:
        """False for a decoder's base model that was saved alone, or that has a head for classes in place of logits, and
        where config.json says that the embedding is the head."""
        if self.kind == "orbax":
            return "head.weight" in orbax_folder.read_description(self.path)["parameters"]
        names = huggingface.map_tensors(self.remote or self.path)
        has_one = MISTRALS_HEAD in names or any(name.endswith(HEAD) for name in names)
        is_base = saved_alone(names) or any(name.startswith(CLASSES) for name in names)
        return has_one or not (is_base or self.says_tied)

    @property
    def says_tied(self) -> bool:
        """Whether config.json says, of the whole or of its text model, that the embedding is the head."""
        levels = (self.config, self.config.get("text_config"))
        return any(isinstance(level, Mapping) and level.get("tie_word_embeddings") is True for level in levels)

    @functools.cached_property
    def stored_forms(self) -> StoredForms:
        """The forms that the weights themselves name."""
        return stored_forms(self.path, self.config, self.remote)

    @property
    def scheme(self) -> Scheme | None:
        """config.json's scheme of quantised tensors, or None."""
        return scheme_of(self.config, self.stored_forms.scale_dtype)

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of a Hugging Face folder, which are read when they are used."""
        return huggingface.map_tensors(self.remote or self.path)

    def load(
        self,
        *,
        rules: Sequence[Rule],
        harmless: Iterable[str],
        targets: Mapping[str, jax.ShapeDtypeStruct],
        expansions: Mapping[str, Expansion] = MappingProxyType({}),
    ) -> dict[str, jax.Array]:
        """{parameter: array} with exactly the shapes, dtypes and shardings of `targets` (default device without one).

        rules, harmless: the family's table, for Hugging Face folders; our own hold parameters by their path.
        expansions: for targets that are longer than their stored tensors.
        On the CPU an array may be the mapped file itself: leave the folder as it is while the arrays live.
        Raises one ValueError for everything that does not fit.
        """
        if self.kind == "huggingface":
            return huggingface.load(
                self.remote or self.path,
                rules=rules,
                harmless=harmless,
                targets=targets,
                expansions=expansions,
                scheme=self.scheme,
            )
        return orbax_folder.restore(self.path, targets, expansions)


def stored_forms(folder: Path, config: Mapping[str, Any], remote: RemoteFolder | None = None) -> StoredForms:
    """The forms that the weights of a folder, or of the URL that it copies, name; empty without weights.

    config: its config.json.
    """
    if (folder / orbax_folder.DESCRIPTION).is_file():
        return StoredForms(forms=orbax_folder.stored_forms(folder))
    if not said_of_forms(config) or (remote is None and not huggingface.has_weights(folder)):
        return StoredForms()
    tensors = huggingface.map_tensors(remote or folder)
    return StoredForms(scale_dtype=stored_scale_dtype({name: x.dtype.name for name, x in tensors.items()}))


def open_checkpoint(
    path: str | os.PathLike[str], revision: str | None = None, *, on_progress: hub.Show | None = None
) -> Checkpoint:
    """The checkpoint in the folder, behind the URL, or of the hub's model. revision, on_progress: as in `hub`.

    Raises ValueError when there is none, saying what was expected.
    """
    text = hub.model_folder(os.fspath(path), revision, on_progress=on_progress)
    remote = RemoteFolder(text) if is_url(text) else None
    folder = Path(text) if remote is None else remote.path
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; name a Hugging Face folder, one that `ferrum-jax convert` wrote, or a model of "
            "the hub as ORG/NAME"
        )
    return Checkpoint(
        kind=_kind(folder, remote),
        path=folder,
        remote=remote,
        config=read_json(folder / "config.json"),
        generation_config=read_optional_json(folder / "generation_config.json"),
    )


def _kind(folder: Path, remote: RemoteFolder | None) -> Literal["huggingface", "orbax"]:
    if (folder / orbax_folder.DESCRIPTION).is_file():
        orbax_folder.read_description(folder)
        return "orbax"
    names = (huggingface.SINGLE, huggingface.INDEX)
    if any((folder / name).is_file() or (remote is not None and name in remote.sizes) for name in names):
        return "huggingface"
    raise ValueError(
        f"{folder if remote is None else remote.url} is not a checkpoint: it has neither "
        f"{orbax_folder.DESCRIPTION} (ours) nor {huggingface.SINGLE} or {huggingface.INDEX} "
        "(Hugging Face); weights in other formats must first be saved as safetensors"
    )


def read_adapter(
    path: str | os.PathLike[str], *, rules: Sequence[Rule], weights: Mapping[str, Shape], max_rank: int | None = None
) -> Adapter:
    """The LoRA in a folder that PEFT saved, or behind its URL, of a model with these rules and weights.

    weights: the shape of each weight by name, whole. Raises one ValueError for all that does not fit: what is not a
    LoRA, what the model has not, other shapes, a missing half, numbers that are not finite, a rank above max_rank.
    """
    text = os.fspath(path)
    remote = RemoteFolder(text) if is_url(text) else None
    folder = Path(text) if remote is None else remote.path
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{text} is not an adapter: it has no {CONFIG}; name a folder that PEFT saved")
    config = AdapterConfig.of(read_json(folder / CONFIG))
    tensors = huggingface.map_file(folder / WEIGHTS) if remote is None else huggingface.map_remote_file(remote, WEIGHTS)
    return take_apart(text, config, tensors, rules=rules, weights=weights, max_rank=max_rank)
