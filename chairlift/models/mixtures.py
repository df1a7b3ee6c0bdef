"""Reads the mixtures of experts of a Hugging Face config. Families say which of these they have (`mixture_families`).

Each function returns a layer's blocks after its mixer for every layer, and no blocks where the layer has a dense MLP.
"""

from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks import (
    Block,
    ClampedSwiGLU,
    ExpertsBlock,
    ParallelExpertsBlock,
    Router,
    Scoring,
    SharedMLPBlock,
)
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.config import Layer
from chairlift.models.fields import has_fused_mlps, read_activation

_SCORINGS = {Scoring.SOFTMAX: ("softmax",), Scoring.SIGMOID: ("sigmoid", "noaux_tc")}  # as `scoring_func` names them
_LFM2_EPS = 1e-6  # these two are written in the models' code
_GLM_EPS = 1e-20


def read_mixtral(config: Any) -> list[Layer]:
    """Every layer has experts. CheckpointError, here as below, for sizes that make no mixture."""
    router = _router(config, is_normalised=True)
    return [(_experts(config, router, config.intermediate_size),)] * config.num_hidden_layers


def read_olmoe(config: Any) -> list[Layer]:
    """As Mixtral, and weights may be left as they are."""
    if config.clip_qkv is not None:
        raise CheckpointError("clip_qkv is not supported")
    router = _router(config, is_normalised=config.norm_topk_prob)
    return [(_experts(config, router, config.intermediate_size),)] * config.num_hidden_layers


def read_qwen3_moe(config: Any) -> list[Layer]:
    """Layers have experts at every `decoder_sparse_step`, but for those that are named."""
    router = _router(config, is_normalised=config.norm_topk_prob)
    return _sparse_layers(config, (_experts(config, router, config.moe_intermediate_size),))


def read_qwen2_moe(config: Any) -> list[Layer]:
    """As Qwen3-MoE, and beside the experts a shared one with a gate."""
    router = _router(config, is_normalised=config.norm_topk_prob)
    blocks = _experts(config, router, config.moe_intermediate_size), _shared(config, has_output_gate=True)
    return _sparse_layers(config, blocks)


def read_qwen3_5_moe(config: Any) -> list[Layer]:
    """As Qwen2-MoE, in every layer, and weights are always normalised."""
    router = _router(config, is_normalised=True)
    blocks = _experts(config, router, config.moe_intermediate_size), _shared(config, has_output_gate=True)
    return [blocks] * config.num_hidden_layers


def read_granite_moe(config: Any) -> list[Layer]:
    """Every layer has experts."""
    return read_mixtral(config)


def read_granite_moe_hybrid(config: Any) -> list[Layer]:
    """As Granite MoE, and beside the experts a shared one; without experts, layers have dense MLPs."""
    if not config.num_local_experts:
        return [()] * config.num_hidden_layers
    experts = _experts(config, _router(config, is_normalised=True), config.intermediate_size)
    shared = SharedMLPBlock(
        intermediate_size=config.shared_intermediate_size,
        activation=read_activation(config),
        is_fused=has_fused_mlps(config),
    )
    return [(experts, shared)] * config.num_hidden_layers


def read_lfm2_moe(config: Any) -> list[Layer]:
    """The first layers are dense; scores are of each expert by itself."""
    router = _router(
        config,
        is_normalised=config.norm_topk_prob,
        scoring=Scoring.SIGMOID,
        eps=_LFM2_EPS,
        scale=_positive(config, "routed_scaling_factor"),
        has_choice_bias=config.use_expert_bias,
    )
    experts = ExpertsBlock(router=router, intermediate_size=_size(config, "moe_intermediate_size"))
    return _after_dense(config, config.num_dense_layers, (experts,))


def read_glm4_moe(config: Any) -> list[Layer]:
    """The first layers are dense; experts are chosen of some groups, and a shared one stands beside them."""
    router = _router(
        config,
        is_normalised=config.norm_topk_prob,
        scoring=Scoring.SIGMOID,
        eps=_GLM_EPS,
        scale=_positive(config, "routed_scaling_factor"),
        has_choice_bias=True,
        num_groups=config.n_group,
        num_chosen_groups=config.topk_group,
    )
    return _after_dense(config, config.first_k_dense_replace, _with_shared(config, router))


def _with_shared(config: Any, router: Router) -> Layer:
    """Experts, and a shared one beside them if there is any."""
    experts = _experts(config, router, config.moe_intermediate_size)
    if not config.n_shared_experts:
        return (experts,)
    size = _size(config, "n_shared_experts") * config.moe_intermediate_size
    return (experts, SharedMLPBlock(intermediate_size=size, activation=read_activation(config)))


def read_glm4_moe_lite(config: Any) -> list[Layer]:
    """As GLM-4.5, and a list says which layers are dense."""
    config.first_k_dense_replace, kinds = 0, config.mlp_layer_types
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError('mlp_layer_types must say of each layer whether it is "dense" or "sparse"')
    return [() if kind == "dense" else layer for kind, layer in zip(kinds, read_glm4_moe(config), strict=True)]


def read_deepseek_v2(config: Any) -> list[Layer]:
    """The first layers are dense; scores are a softmax, and weights are not normalised."""
    groups = {}
    match config.topk_method:
        case "greedy":
            pass
        case "group_limited_greedy":
            groups = {"num_groups": config.n_group, "num_chosen_groups": config.topk_group, "num_scored_of_group": 1}
        case other:
            raise CheckpointError(f"topk_method {shown(other)} is not supported, only greedy and group_limited_greedy")
    router = _router(config, is_normalised=False, scale=_positive(config, "routed_scaling_factor"), **groups)
    return _after_dense(config, config.first_k_dense_replace, _with_shared(config, router))


def read_ernie4_5_moe(config: Any) -> list[Layer]:
    """Layers of a range have experts at every interval, and beside them shared ones."""
    blocks: tuple[Block, ...] = (
        _experts(
            config, _router(config, is_normalised=True, has_choice_bias=True), _size(config, "moe_intermediate_size")
        ),
    )
    if config.moe_num_shared_experts:
        if config.use_bias:
            raise CheckpointError("use_bias is not supported beside shared experts")
        size = _size(config, "moe_num_shared_experts") * config.moe_intermediate_size
        blocks += (SharedMLPBlock(intermediate_size=size, activation=read_activation(config)),)
    interval, first, last = (
        _size(config, "moe_layer_interval"),
        config.moe_layer_start_index,
        config.moe_layer_end_index,
    )
    layers = range(config.num_hidden_layers)
    return [blocks if first <= layer <= last and (layer + 1) % interval == 0 else () for layer in layers]


def read_gpt_oss(config: Any) -> list[Layer]:
    """Every layer has experts, with biases and a gate that is clamped."""
    router = _router(config, is_normalised=True, has_bias=True)
    limits = ClampedSwiGLU(_positive(config, "swiglu_alpha"), _positive(config, "swiglu_limit"))
    experts = ExpertsBlock(router=router, intermediate_size=config.intermediate_size, activation=limits, has_bias=True)
    return [(experts,)] * config.num_hidden_layers


def read_gemma4_experts(config: Any) -> ParallelExpertsBlock | None:
    """Every layer has experts beside its dense MLP; None: no layer has."""
    if not getattr(config, "enable_moe_block", False):
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        _size(config, name)
    num_chosen, logit_scale = config.top_k_experts, config.hidden_size**-0.5
    router = _router(config, num_chosen=num_chosen, is_normalised=True, logit_scale=logit_scale)
    return ParallelExpertsBlock(
        router=router, intermediate_size=config.moe_intermediate_size, activation=read_activation(config)
    )


def _router(
    config: Any,
    *,
    is_normalised: bool,
    num_chosen: int | None = None,
    scoring: Scoring = Scoring.SOFTMAX,
    **fields: Any,
) -> Router:
    num_experts: int = config.num_experts if hasattr(config, "num_experts") else config.num_local_experts
    num_chosen = config.num_experts_per_tok if num_chosen is None else num_chosen
    if type(num_experts) is not int or not 1 <= num_experts <= MAX_EXPERTS:
        raise CheckpointError(
            f"it has {shown(num_experts)} experts, which must be a whole number from 1 to {MAX_EXPERTS}"
        )
    for count in (num_chosen, fields.get("num_groups", 1), fields.get("num_chosen_groups", 1)):
        if type(count) is not int:  # another name of a field may hold anything
            raise CheckpointError(f"experts are chosen in whole numbers, not {shown(count)}")
    stated = getattr(config, "scoring_func", None)  # most configs leave it to the architecture
    if stated is not None and stated not in _SCORINGS[scoring]:
        raise CheckpointError(f"scoring_func {shown(stated)} is not supported in this architecture, only {scoring}")
    fields |= {"num_experts": num_experts, "num_chosen": num_chosen, "scoring": scoring}
    try:
        return Router(is_normalised=is_normalised, **fields)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _experts(config: Any, router: Router, intermediate_size: int) -> ExpertsBlock:
    if type(intermediate_size) is not int or intermediate_size < 1:
        raise CheckpointError(f"its experts must have at least 1 inner feature, not {shown(intermediate_size)}")
    return ExpertsBlock(router=router, intermediate_size=intermediate_size, activation=read_activation(config))


def _shared(config: Any, *, has_output_gate: bool) -> SharedMLPBlock:
    return SharedMLPBlock(
        intermediate_size=_size(config, "shared_expert_intermediate_size"),
        activation=read_activation(config),
        has_output_gate=has_output_gate,
    )


def _sparse_layers(config: Any, blocks: Layer) -> list[Layer]:
    step, dense = _size(config, "decoder_sparse_step"), set(config.mlp_only_layers or ())
    layers = range(config.num_hidden_layers)
    return [blocks if layer not in dense and (layer + 1) % step == 0 else () for layer in layers]


def _after_dense(config: Any, num_dense: int, blocks: Layer) -> list[Layer]:
    return [blocks if layer >= num_dense else () for layer in range(config.num_hidden_layers)]


def _size(config: Any, name: str) -> int:
    size = getattr(config, name)
    if type(size) is not int or size < 1:
        raise CheckpointError(f"{name} must be at least 1, not {shown(size)}")
    return size


def _positive(config: Any, name: str) -> float:
    value = getattr(config, name)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{name} must be a positive number, not {shown(value)}")
    return float(value)
