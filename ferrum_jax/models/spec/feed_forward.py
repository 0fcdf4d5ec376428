"""MLPs, and experts in their place."""

import dataclasses

from ferrum_jax.models.spec.checks import check_positive

SCORINGS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """MLPs, and how experts join gate and up.

    gated: down is given hidden_act(gate) * up, else hidden_act(up). gate_multiplier, output_multiplier: gate, and what
    down gives, are multiplied by it. swiglu_limit: gated by
    clamped SwiGLU with swiglu_alpha; None is hidden_act(gate) * up. gated_limit: there hidden_act(gate) is at most it,
    and up within it; 0 is without.
    """

    intermediate_size: int
    hidden_act: str = "silu"
    bias: bool = False
    gated: bool = True
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    gated_limit: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts in place of the MLP of some layers.

    layers: those that have experts, at least one; the others have an MLP. intermediate_size: of an expert.
    scoring: what makes an expert's score of its logit. corrected: experts are chosen by score plus a correction, and
    weighed by score alone. num_groups, num_chosen_groups: only experts of the groups whose num_best best scores sum
    highest are chosen; zero_outside: the others stand at 0, before those chosen whose score is negative.
    norm_topk_prob: the weights of a token's experts sum to one, before they are multiplied by
    routed_scaling_factor. rivals_within: an expert is weighed by softmax over its rivals, which are those not chosen
    before it whose logits are behind its own by this share at most; None is by its score.
    weighs_inputs: what an expert is given is multiplied by its weight, not what it gives.
    shared_intermediate_size: of one more expert that all tokens go to, 0 for none; shared_gate: behind a gate.
    own_norms: the shared expert, the others together, and the router each norm what they are given, and the first two
    what they give; the router's norm has a scale of each value, and an expert's weight one of that expert.
    bias: of routers and experts. has_gates: down is given hidden_act(gate) * up, else hidden_act(up).
    limits: of some layers (layer, that of its experts, that of its shared expert), as `MlpSpec.gated_limit`.
    gate_limit: gates are at most this, and up within it, but for the shared expert; None is no limit.

    Raises ValueError naming the field whose value cannot be.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: str = "softmax"
    corrected: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_best: int = 2
    zero_outside: bool = False
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    rivals_within: float | None = None
    weighs_inputs: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    own_norms: bool = False
    bias: bool = False
    has_gates: bool = True
    limits: tuple[tuple[int, float, float], ...] = ()
    gate_limit: float | None = None

    def __post_init__(self) -> None:
        assert self.layers, "a model whose layers are all dense has no ExpertsSpec"
        assert self.scoring in SCORINGS, f"scoring is {self.scoring!r}; known are {SCORINGS}"
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size is {self.intermediate_size}; it must be at least 1")
        if self.num_experts % self.num_groups or not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"topk_group is {self.num_chosen_groups} of n_group, {self.num_groups}, groups of {self.num_experts} "
                "experts; they must divide the experts"
            )
        in_chosen = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_experts_per_tok > in_chosen:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {in_chosen} in the chosen groups")
        assert self.rivals_within is None or not (self.corrected or self.num_groups > 1), "no layer computes this"
        assert not self.own_norms or (self.shared_intermediate_size and not self.shared_gate), "no layer computes this"
        if self.weighs_inputs and self.num_experts_per_tok != 1:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; where inputs are weighed it must be 1"
            )

    def limits_of(self, layer: int) -> tuple[float, float]:
        """The limits of a layer's experts, and of its shared one."""
        return next(((routed, shared) for i, routed, shared in self.limits if i == layer), (0.0, 0.0))

    @property
    def chosen_share(self) -> float:
        """The share of a layer's experts that a token goes to."""
        return self.num_experts_per_tok / self.num_experts
