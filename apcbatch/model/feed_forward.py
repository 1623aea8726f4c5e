"""Feed-forward sub-blocks: a SwiGLU MLP (Jamba, Qwen3.5, Granite) or one with a squared ReLU (Nemotron-H), and a
mixture of such experts (Jamba, Granite, Nemotron-H).

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


def _load_mlp(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load an MLP: one expert for all tokens."""
    return Fused(source.backend, source.backend.sub_block(MLP.name, norm, _expert(config, source)))


def _load_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load a mixture of experts. Each token uses its num_experts_per_tok likeliest experts."""
    router = source.pack(source.take("router.weight", (config.num_experts, config.hidden_size)))
    experts = [_expert(config, source.below(f"experts.{i}")) for i in range(config.num_experts)]
    part = source.backend.sub_block(MIXTURE.name, norm, router, experts, config.num_experts_per_tok)
    return Fused(source.backend, part)


def _expert(config: ModelConfig, source: TensorSource) -> Expert[Linear]:
    from apcbatch.kernels.layer import Expert

    h, f = config.hidden_size, config.intermediate_size
    gate = source.take("gate_proj.weight", (f, h))
    up = source.take("up_proj.weight", (f, h))
    return Expert(source.pack_parts(gate=gate, up=up), source.packed_output("down_proj", h, f))  # (2f, h), (h, f)


def _load_shared_mlp(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load an MLP from Granite's tensors: input_linear has the rows of gate, then of up."""
    from apcbatch.kernels.layer import Expert

    h, f = config.hidden_size, _shared_columns(config)
    expert = Expert(source.packed("input_linear", 2 * f, h), source.packed_output("output_linear", h, f))
    return Fused(source.backend, source.backend.sub_block(MLP.name, norm, expert))


def _load_normalised_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load a mixture from Granite's tensors, each of which holds all experts. A token's experts are weighted by the
    softmax over their own router logits."""
    from apcbatch.kernels.layer import Expert

    count, h, f = config.num_experts, config.hidden_size, config.intermediate_size
    router = source.packed("router.layer", count, h)
    inputs = source.take("input_linear.weight", (count, 2 * f, h))
    outputs = source.take("output_linear.weight", (count, h, f))
    experts = [Expert(source.pack(inputs[i]), source.pack_output(outputs[i])) for i in range(count)]
    part = source.backend.sub_block(MIXTURE.name, norm, router, experts, config.num_experts_per_tok, True)
    return Fused(source.backend, part)


def _load_relu2_mlp(columns: str, config: ModelConfig, source: TensorSource, norm: PreNorm, _: StateTensors) -> Fused:
    """Load an MLP with a squared ReLU. columns: the config's field of its inner columns."""
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
    """Return the inner columns of Granite's MLP: the config's field shared_intermediate_size."""
    fields: Any = config
    columns: int = fields.shared_intermediate_size
    return columns


def _mlp_products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    h, f = config.hidden_size, config.intermediate_size
    return {"gate_up_proj": (h, 2 * f), "down_proj": (f, h)}


def _shared_products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    h, f = config.hidden_size, _shared_columns(config)
    return {"input_linear": (h, 2 * f), "output_linear": (f, h)}


def _mixture_products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    return {**_mlp_products(config), "router": (config.hidden_size, config.num_experts)}


def _relu2_products(columns: str, name: str, config: ModelConfig) -> dict[str, tuple[int, int]]:
    h, f = config.hidden_size, getattr(config, columns)
    return {f"{name}up_proj": (h, f), f"{name}down_proj": (f, h)}


def _relu2_mixture_products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    fields: Any = config
    h, f, latent = config.hidden_size, fields.moe_intermediate_size, fields.moe_latent_size
    projections = {"fc1_latent_proj": (h, latent), "fc2_latent_proj": (latent, h)} if latent else {}
    experts = {"expert_up_proj": (latent or h, f), "expert_down_proj": (f, latent or h)}
    return {**experts, "router": (h, config.num_experts), **projections}


def relu2_mlp(columns: str, prefix: str = "") -> SubBlockKind:
    """Return the SubBlockKind of MLPs with a squared ReLU. columns: the config's field of their inner columns. prefix:
    of their products' names."""
    return SubBlockKind("relu2_mlp", partial(_load_relu2_mlp, columns), partial(_relu2_products, columns, prefix))


MLP = SubBlockKind("mlp", _load_mlp, _mlp_products)
MIXTURE = SubBlockKind("mixture", _load_mixture, _mixture_products)
SHARED_MLP = SubBlockKind("mlp", _load_shared_mlp, _shared_products)
NORMALISED_MIXTURE = SubBlockKind("mixture", _load_normalised_mixture, _mixture_products)
RELU2_MIXTURE = SubBlockKind("relu2_mixture", _load_relu2_mixture, _relu2_mixture_products)
