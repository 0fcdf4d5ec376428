"""Which parameters of a model have a form: what config.json says of a checkpoint's modules, by the family's rules."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints.formats import Scheme, StoredForms, refusal, said_of_forms, scheme_of
from checkpoints.rules import Rule
from checkpoints.stored_weight import WeightForm, made_form
from ferrum_jax.models.spec import ModelSpec

# The parameters that a form may be of: matrices of products, not embeddings or convolutions.
_MATRICES = (
    *("head.weight", "layers.*.attention.*.weight", "layers.*.mlp.*.weight", "layers.*.mlp.experts.*"),
    *("layer_inputs.projection.weight", "layers.*.own_input.*.weight"),
)
_OTHERS = ("*norm.weight", "layers.*.mlp.experts.*_bias")
# What tools leave dense without a word about it; a format that names all its modules is taken at its word.
_SMALL = ("head.weight", "*.mlp.router.weight", "*.mlp.shared_gate.weight")


def forms_of(
    rules: Sequence[Rule], config: Mapping[str, Any], stored: StoredForms
) -> tuple[tuple[str, WeightForm], ...]:
    """(parameter, its form) of those that are not dense. stored: what the weights themselves say.

    Raises ValueError for a format that is not supported, of this architecture or at all, and for layers that are not
    there.
    """
    scheme = scheme_of(config, stored.scale_dtype)
    if stored.forms is not None:
        return stored.forms
    if scheme is None:
        return ()
    found, modules = {}, set()
    for rule in rules:
        for target, sources in rule.expand():
            if not _is_matrix(target):
                continue
            own = [source.name.removesuffix(".weight") for source in sources]
            module, form = own[0], _form_of_all(scheme, own, target)
            modules.update(own)
            if form is None or (
                not scheme.names_all and _fits(target, _SMALL) and not (scheme.has_head and module == "lm_head")
            ):
                continue
            _refuse_layout(rule, scheme, config)
            found[target] = form
    _refuse_names(scheme, modules, found, config)
    return tuple(sorted(found.items()))


def with_made_forms(spec: ModelSpec, rules: Sequence[Rule], weights: str) -> ModelSpec:
    """The spec of a dense model whose weights are quantised as `made_form` names it; "auto" leaves it as it is.

    Raises ValueError where they are quantised already.
    """
    form = made_form(weights)
    if form is None:
        return spec
    if spec.forms:
        kinds = sorted({own.kind for _, own in spec.forms})
        raise ValueError(
            f"weights is {weights!r}, and the checkpoint's are quantised already ({', '.join(kinds)}): they are not "
            "quantised again; give the dense checkpoint, or leave weights='auto'"
        )
    targets = {target for rule in rules for target, _ in rule.expand()}
    names = sorted(name for name in targets if _is_matrix(name) and not _fits(name, _SMALL))
    return dataclasses.replace(spec, forms=tuple((name, form) for name in names))


def _form_of_all(scheme: Scheme, modules: Sequence[str], target: str) -> WeightForm | None:
    """The form of these modules, which are one parameter. Raises ValueError where config.json gives them several."""
    forms = {scheme.form_of(module): module for module in reversed(modules)}
    if len(forms) > 1:
        (form, module), (other, its) = list(forms.items())[:2]
        raise ValueError(
            f"{target} is of one form, and config.json says that {module} is {form or 'dense'} and {its} is "
            f"{other or 'dense'}; give a checkpoint whose modules of a kind are quantised alike"
        )
    return scheme.form_of(modules[0])


def _is_matrix(target: str) -> bool:
    return _fits(target, _MATRICES) and not _fits(target, _OTHERS)


def _fits(target: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns)


def _refuse_layout(rule: Rule, scheme: Scheme, config: Mapping[str, Any]) -> None:
    transposed = rule.part is not None and rule.part.transposed
    if transposed == scheme.transposed:
        return
    key, value = _described(config)
    names = "of this architecture mxfp4 is supported" if transposed else "of gpt-oss alone it is supported"
    raise ValueError(f"{refusal(key, value)}; {names}")


def _refuse_names(
    scheme: Scheme, modules: set[str], found: Mapping[str, WeightForm], config: Mapping[str, Any]
) -> None:
    key, value = _described(config)
    missing = [
        name
        for name in scheme.targets
        if name not in modules and not name.startswith("re:")  # a pattern may be one for several models
    ]
    if missing:
        raise ValueError(f"{key} of config.json names layers that the model does not have: {missing}; correct it")
    if not found:
        raise ValueError(f"{refusal(key, value)}: it names no layer of this model")


def _described(config: Mapping[str, Any]) -> tuple[str, Any]:
    return next(iter(said_of_forms(config).items()))
