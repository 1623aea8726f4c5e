"""Feed-forward sub-blocks: a SwiGLU MLP (Jamba, Qwen3.5, Granite, Bamba, Falcon-H1, LFM2) or one with a squared ReLU
(Nemotron-H), gated by each token in the expert that all tokens share (Qwen), and a mixture of such experts (Jamba,
Granite, Qwen, LFM2, Nemotron-H).

torch is imported only when one is loaded. Invariant: a token's result does not depend on other tokens or their routing;
it is the sum over its experts, in ascending order of expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import Expert, Linear, PreNorm, SigmoidRouting
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True)
class Mlp(SubBlockKind):
    """An MLP: one expert for all tokens. columns (f): inner ones. inputs: names of the projections gate and up, or of
    one with the rows of both, or of up alone if is_gated is False: then the activation is a squared ReLU. output: name
    of the last projection. token_gate: name of a projection to one column, whose sigmoid is a factor of a token's
    output; None: no factor."""

    name = "mlp"
    columns: int
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    output: str = "down_proj"
    is_gated: bool = True
    token_gate: str | None = None

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        h = len(norm.weight)
        expert = self.expert(source, h)
        gate = None if self.token_gate is None else source.packed(self.token_gate, 1, h)
        return self.fused(source, norm, expert, gate)

    def expert(self, source: TensorSource, h: int) -> Expert[Linear]:
        """Return the expert of the source's tensors, with inputs and outputs of h columns."""
        from apcbatch.kernels.layer import Expert

        f = self.columns
        if len(self.inputs) == 2:
            gate, up = (source.take(f"{name}.weight", (f, h)) for name in self.inputs)
            inputs = source.pack_parts(gate=gate, up=up)
        else:
            inputs = source.packed(self.inputs[0], 2 * f if self.is_gated else f, h)
        return Expert(inputs, source.packed_output(self.output, h, f), self.is_gated)


@dataclass(frozen=True)
class Sigmoid:
    """Choice of experts by sigmoids (apcbatch.kernels.layer.SigmoidRouting). bias: name of the tensor with the
    experts' biases; None: zeros."""

    bias: str | None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    eps: float = 1e-20

    def routing(self, source: TensorSource, experts: int, device: torch.device) -> SigmoidRouting:
        """Return the routing with the bias of the source."""
        import torch

        from apcbatch.kernels.layer import SigmoidRouting

        bias = torch.zeros(experts, device=device) if self.bias is None else source.vector(self.bias, experts)
        return SigmoidRouting(bias, self.groups, self.top_groups, self.scale, self.eps)


@dataclass(frozen=True, kw_only=True)
class Mixture(SubBlockKind):
    """A mixture of experts, of which each token uses the per_token likeliest ones. expert: each of them, below
    `experts`. router: name of the router's projection. stacked: names of two tensors with the projections of all
    experts, (experts, 2f, h) and (experts, h, f); None: one by one, or in the two that the modules of transformers 5
    have. is_normalised: whether the weights of a token's experts are divided by their sum. sigmoid: None for a softmax.
    float32_router: whether the router is float32 for every dtype. latent: columns of the experts' inputs and outputs,
    between two projections; 0: those of the residual, without projections."""

    name = "mixture"
    experts: int
    per_token: int
    expert: Mlp
    router: str
    stacked: tuple[str, str] | None = None
    is_normalised: bool = False
    sigmoid: Sigmoid | None = None
    float32_router: bool = False
    latent: int = 0

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        import torch

        h, latent = len(norm.weight), self.latent
        routed = replace(source, dtype=torch.float32) if self.float32_router else source
        router = routed.packed(self.router, self.experts, h)
        sigmoid = None if self.sigmoid is None else self.sigmoid.routing(source, self.experts, norm.weight.device)
        inner = source
        projections: tuple[Linear, ...] = ()
        if latent:
            inner = replace(source, output_scale=1.0)
            projections = (
                source.packed("fc1_latent_proj", latent, h),
                source.packed_output("fc2_latent_proj", h, latent),
            )
        experts = self._experts(inner, latent or h)
        rule = self.per_token, self.is_normalised, sigmoid, projections
        return self.fused(source, norm, router, experts, *rule)

    def _experts(self, source: TensorSource, h: int) -> list[Expert[Linear]]:
        from apcbatch.kernels.layer import Expert

        gate_up, down = self.stacked or ("experts.gate_up_proj", "experts.down_proj")
        if self.stacked is None and gate_up not in source:
            return [self.expert.expert(source.below(f"experts.{i}"), h) for i in range(self.experts)]
        count, f = self.experts, self.expert.columns
        inputs, outputs = source.take(gate_up, (count, 2 * f, h)), source.take(down, (count, h, f))
        return [Expert(source.pack(inputs[i]), source.pack_output(outputs[i])) for i in range(count)]

    @property
    def fields(self) -> dict[str, Any]:
        return {"num_experts": self.experts, "num_experts_per_tok": self.per_token}
