"""Feed-forward sub-blocks: a SwiGLU MLP (Jamba, Qwen3.5, Granite, Bamba, Falcon-H1, LFM2) or one with a squared ReLU
(Nemotron-H), a mixture of such experts (Jamba, Granite, Qwen, LFM2, Nemotron-H), and the gated expert that all tokens
share (Qwen).

torch is imported only when one is loaded. Invariant: a token's result does not depend on other tokens or their routing;
it is the sum over its experts, in ascending order of expert.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import Expert, Linear, PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LFM2_PROJECTIONS = ("w1", "w3", "w2")


def _load_mlp(
    projections: tuple[str, str, str], config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors
) -> Fused:
    """Load an MLP: one expert for all tokens."""
    expert = _expert(source, config.hidden_size, config.intermediate_size, projections)
    return Fused(source.backend, source.backend.sub_block(MLP.name, norm, expert))


def _load_mixture(
    kind: str, router: str, config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors
) -> Fused:
    """Load a mixture of experts. Each token uses its num_experts_per_tok likeliest experts."""
    packed = source.packed(router, config.num_experts, config.hidden_size)
    experts = _experts(config, source, config.intermediate_size)
    return Fused(source.backend, source.backend.sub_block(kind, norm, packed, experts, config.num_experts_per_tok))


def _experts(
    config: ModelConfig, source: TensorSource, f: int, projections: tuple[str, str, str] = _PROJECTIONS
) -> list[Expert[Linear]]:
    """Return the experts of a mixture, of f inner columns. A checkpoint has them one by one, or all in two tensors, as
    the modules of transformers 5 do. projections: names of gate, up and down of a single one."""
    if "experts.gate_up_proj" in source:
        return _packed_experts(config, source, f, "experts.gate_up_proj", "experts.down_proj")
    below = (source.below(f"experts.{i}") for i in range(config.num_experts))
    return [_expert(one, config.hidden_size, f, projections) for one in below]


def _packed_experts(config: ModelConfig, source: TensorSource, f: int, gate_up: str, down: str) -> list[Expert[Linear]]:
    """Return the experts that are stored in two tensors (experts, 2f, h) and (experts, h, f)."""
    from apcbatch.kernels.layer import Expert

    count, h = config.num_experts, config.hidden_size
    inputs, outputs = source.take(gate_up, (count, 2 * f, h)), source.take(down, (count, h, f))
    return [Expert(source.pack(inputs[i]), source.pack_output(outputs[i])) for i in range(count)]


def _expert(source: TensorSource, h: int, f: int, projections: tuple[str, str, str] = _PROJECTIONS) -> Expert[Linear]:
    """Return an expert of f inner columns. projections: names of gate, up and down."""
    from apcbatch.kernels.layer import Expert

    gate, up = (source.take(f"{name}.weight", (f, h)) for name in projections[:2])
    down = source.packed_output(projections[2], h, f)
    return Expert(source.pack_parts(gate=gate, up=up), down)  # (2f, h), (h, f)


def _load_shared_mlp(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load an MLP from Granite's tensors: input_linear has the rows of gate, then of up."""
    from apcbatch.kernels.layer import Expert

    h, f = config.hidden_size, _shared_columns(config)
    expert = Expert(source.packed("input_linear", 2 * f, h), source.packed_output("output_linear", h, f))
    return Fused(source.backend, source.backend.sub_block(MLP.name, norm, expert))


def _load_normalised_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load a mixture from Granite's tensors, each of which holds all experts. A token's experts are weighted by the
    softmax over their own router logits."""
    router = source.packed("router.layer", config.num_experts, config.hidden_size)
    names = "input_linear.weight", "output_linear.weight"
    experts = _packed_experts(config, source, config.intermediate_size, *names)
    part = source.backend.sub_block(NORMALISED_MIXTURE.name, norm, router, experts, config.num_experts_per_tok)
    return Fused(source.backend, part)


def _load_sigmoid_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load a mixture whose experts are chosen by sigmoids (SigmoidRouting), from LFM2's tensors. The config has the
    fields moe_intermediate_size, use_expert_bias, norm_topk_prob and routed_scaling_factor."""
    import torch

    from apcbatch.kernels.layer import SigmoidRouting

    fields: Any = config
    count = config.num_experts
    has_bias, device = fields.use_expert_bias, norm.weight.device
    bias = source.vector("expert_bias", count) if has_bias else torch.zeros(count, device=device)
    sigmoid = SigmoidRouting(bias, scale=fields.routed_scaling_factor, eps=1e-6)
    router = source.packed("gate", count, config.hidden_size)
    experts = _experts(config, source, fields.moe_intermediate_size, LFM2_PROJECTIONS)
    rule = config.num_experts_per_tok, fields.norm_topk_prob, sigmoid
    return Fused(source.backend, source.backend.sub_block(SIGMOID_MIXTURE.name, norm, router, experts, *rule))


def _load_shared_expert(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load the expert that all tokens share. Its output is multiplied by the sigmoid of the token's shared_expert_gate
    logit."""
    expert = _expert(source.below("shared_expert"), config.hidden_size, _shared_columns(config))
    gate = source.packed("shared_expert_gate", 1, config.hidden_size)
    return Fused(source.backend, source.backend.sub_block(SHARED_EXPERT.name, norm, expert, gate))


def _load_relu2_mlp(columns: str, config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load an MLP with a squared ReLU. columns: name of the config's field for its inner columns."""
    expert = _relu2_expert(source, config.hidden_size, getattr(config, columns))
    return Fused(source.backend, source.backend.sub_block("relu2_mlp", norm, expert))


def _load_relu2_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load a mixture of experts with a squared ReLU, chosen by sigmoids (SigmoidRouting). The router is float32 for
    every dtype. The config has the fields moe_intermediate_size, moe_latent_size (0: no latent projections),
    norm_topk_prob, n_group, topk_group and routed_scaling_factor."""
    import torch

    from apcbatch.kernels.layer import SigmoidRouting

    fields: Any = config
    count, h, f, latent = config.num_experts, config.hidden_size, fields.moe_intermediate_size, fields.moe_latent_size
    router = replace(source, dtype=torch.float32).packed("gate", count, h)
    bias = source.vector("gate.e_score_correction_bias", count)
    sigmoid = SigmoidRouting(bias, fields.n_group, fields.topk_group, fields.routed_scaling_factor)
    inner = source
    projections: tuple[Linear, ...] = ()
    if latent:
        inner = replace(source, output_scale=1.0)
        projections = source.packed("fc1_latent_proj", latent, h), source.packed_output("fc2_latent_proj", h, latent)
    experts = [_relu2_expert(inner.below(f"experts.{i}"), latent or h, f) for i in range(count)]
    rule = config.num_experts_per_tok, fields.norm_topk_prob, sigmoid
    return Fused(
        source.backend, source.backend.sub_block(RELU2_MIXTURE.name, norm, router, experts, *rule, projections)
    )


def _relu2_expert(source: TensorSource, h: int, f: int) -> Expert[Linear]:
    from apcbatch.kernels.layer import Expert

    return Expert(source.packed("up_proj", f, h), source.packed_output("down_proj", h, f), is_gated=False)


def _shared_columns(config: ModelConfig) -> int:
    """Return the inner columns of the MLP or expert beside a mixture: the config's field shared_intermediate_size."""
    fields: Any = config
    columns: int = fields.shared_intermediate_size
    return columns


def mlp(projections: tuple[str, str, str]) -> SubBlockKind:
    """Return the SubBlockKind of MLPs. projections: names of gate, up and down."""
    return SubBlockKind("mlp", partial(_load_mlp, projections))


def mixture(router: str, is_normalised: bool) -> SubBlockKind:
    """Return the SubBlockKind of mixtures whose experts are below `experts`. router: name of the router's tensor.
    is_normalised: the weights of a token's experts are divided by their sum."""
    kind = "normalised_mixture" if is_normalised else "mixture"
    return SubBlockKind(kind, partial(_load_mixture, kind, router))


def relu2_mlp(columns: str) -> SubBlockKind:
    """Return the SubBlockKind of MLPs with a squared ReLU. columns: name of the config's field for their inner
    columns."""
    return SubBlockKind("relu2_mlp", partial(_load_relu2_mlp, columns))


MLP = mlp(_PROJECTIONS)
MIXTURE = mixture("router", is_normalised=False)
SHARED_MLP = SubBlockKind("mlp", _load_shared_mlp)
NORMALISED_MIXTURE = SubBlockKind("normalised_mixture", _load_normalised_mixture)
SIGMOID_MIXTURE = SubBlockKind("sigmoid_mixture", _load_sigmoid_mixture)
SHARED_EXPERT = SubBlockKind("shared_expert", _load_shared_expert)
RELU2_MIXTURE = SubBlockKind("relu2_mixture", _load_relu2_mixture)
