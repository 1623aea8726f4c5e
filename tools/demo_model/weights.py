"""The demo weights: a Jamba with every kind of layer, drawn from a seeded stream.

Draws are uniform, made from the generator's integers by one multiplication: the same bits on every machine
and with every version of torch. Scales keep each block's output as large as its input, so that recurrent
state, convolution tail, keys and values all move the greedy answer.
Must not know: text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from demo_model.tokenizer import BOS, BYTES, CONTROL, END, MAX_TOKENS, PAD, VOCAB_SIZE

Array = npt.NDArray[np.float64]

SEED = 20240717
HIDDEN, LAYERS, INTERMEDIATE = 128, 6, 256
ATTENTION_PERIOD, ATTENTION_OFFSET = 6, 3
EXPERT_PERIOD, EXPERT_OFFSET, EXPERTS, EXPERTS_PER_TOKEN = 2, 1, 4, 2
HEADS, KV_HEADS = 4, 2
D_STATE, D_CONV, EXPAND, DT_RANK = 16, 4, 2, 8
D_INNER = EXPAND * HIDDEN
DT_MIN, DT_MAX = 0.001, 0.1
LOGIT_STD = 3.0
END_SCALE, BYTE_SCALE = 1.6, 0.6  # how large the logits of <|end|> and of lone bytes are beside those of text


def config() -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["JambaForCausalLM"],
        "attention_dropout": 0.0,
        "attn_layer_offset": ATTENTION_OFFSET,
        "attn_layer_period": ATTENTION_PERIOD,
        "bos_token_id": CONTROL.index(BOS),
        "dtype": "bfloat16",
        "eos_token_id": CONTROL.index(END),
        "expert_layer_offset": EXPERT_OFFSET,
        "expert_layer_period": EXPERT_PERIOD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "mamba_conv_bias": True,
        "mamba_d_conv": D_CONV,
        "mamba_d_state": D_STATE,
        "mamba_dt_rank": DT_RANK,
        "mamba_expand": EXPAND,
        "mamba_proj_bias": False,
        "max_position_embeddings": MAX_TOKENS,
        "model_type": "jamba",
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "output_router_logits": False,
        "pad_token_id": CONTROL.index(PAD),
        "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mamba_kernels": False,
        "vocab_size": VOCAB_SIZE,
    }


def generation_config() -> dict[str, Any]:
    """The contents of generation_config.json."""
    return {
        "bos_token_id": CONTROL.index(BOS),
        "do_sample": False,
        "eos_token_id": CONTROL.index(END),
        "pad_token_id": CONTROL.index(PAD),
    }


class Draws:
    """Weights from one seeded stream; the order of the calls is part of the result."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def matrix(self, out_features: int, in_features: int, gain: float = 1.0) -> Array:
        """(out_features, in_features) with standard deviation gain / sqrt(in_features)."""
        return self.uniform((out_features, in_features), gain / math.sqrt(in_features))

    def uniform(self, shape: tuple[int, ...], std: float) -> Array:
        """Uniform around 0 with the given standard deviation."""
        return (self._generator.random(shape) * 2.0 - 1.0) * (std * math.sqrt(3.0))

    def dt_bias(self) -> Array:
        """(d_inner,): softplus of it is log-uniform from DT_MIN to DT_MAX, as in Mamba."""
        span = math.log(DT_MAX) - math.log(DT_MIN)
        dt = np.exp(self._generator.random(D_INNER) * span + math.log(DT_MIN))
        return dt + np.log(-np.expm1(-dt))


def mamba_tensors(draws: Draws) -> Iterator[tuple[str, Array]]:
    """The tensors of one Mamba mixer."""
    yield "in_proj.weight", draws.matrix(2 * D_INNER, HIDDEN, gain=1.4)
    yield "conv1d.weight", draws.uniform((D_INNER, 1, D_CONV), 0.6)
    yield "conv1d.bias", draws.uniform((D_INNER,), 0.1)
    yield "x_proj.weight", draws.matrix(DT_RANK + 2 * D_STATE, D_INNER)
    yield "dt_proj.weight", draws.matrix(D_INNER, DT_RANK)
    yield "dt_proj.bias", draws.dt_bias()
    yield "A_log", np.log(np.tile(np.arange(1.0, D_STATE + 1.0), (D_INNER, 1)))
    yield "D", np.ones(D_INNER)
    yield "out_proj.weight", draws.matrix(HIDDEN, D_INNER, gain=2.0)
    yield "dt_layernorm.weight", np.ones(DT_RANK)
    yield "b_layernorm.weight", np.ones(D_STATE)
    yield "c_layernorm.weight", np.ones(D_STATE)


def attention_tensors(draws: Draws) -> Iterator[tuple[str, Array]]:
    """The tensors of one attention mixer."""
    kv_features = HIDDEN // HEADS * KV_HEADS
    yield "q_proj.weight", draws.matrix(HIDDEN, HIDDEN, gain=1.5)
    yield "k_proj.weight", draws.matrix(kv_features, HIDDEN, gain=1.5)
    yield "v_proj.weight", draws.matrix(kv_features, HIDDEN, gain=2.0)
    yield "o_proj.weight", draws.matrix(HIDDEN, HIDDEN, gain=2.0)


def mlp_tensors(draws: Draws) -> Iterator[tuple[str, Array]]:
    """The tensors of one dense layer or of one expert."""
    yield "gate_proj.weight", draws.matrix(INTERMEDIATE, HIDDEN, gain=1.5)
    yield "up_proj.weight", draws.matrix(INTERMEDIATE, HIDDEN, gain=1.5)
    yield "down_proj.weight", draws.matrix(HIDDEN, INTERMEDIATE, gain=1.5)


def layer_tensors(draws: Draws, layer: int) -> Iterator[tuple[str, Array]]:
    """The tensors of one decoder layer, named from the layer on."""
    is_attention = layer % ATTENTION_PERIOD == ATTENTION_OFFSET
    mixer = attention_tensors(draws) if is_attention else mamba_tensors(draws)
    for name, tensor in mixer:
        yield f"{'self_attn' if is_attention else 'mamba'}.{name}", tensor
    if layer % EXPERT_PERIOD == EXPERT_OFFSET:
        yield "feed_forward.router.weight", draws.matrix(EXPERTS, HIDDEN, gain=1.5)
        for expert in range(EXPERTS):
            for name, tensor in mlp_tensors(draws):
                yield f"feed_forward.experts.{expert}.{name}", tensor
    else:
        for name, tensor in mlp_tensors(draws):
            yield f"feed_forward.{name}", tensor
    yield "input_layernorm.weight", np.ones(HIDDEN)
    yield "pre_ff_layernorm.weight", np.ones(HIDDEN)


def head(draws: Draws) -> Array:
    """(vocab, hidden): control tokens never win, except <|end|>, which wins now and then."""
    weight = draws.matrix(VOCAB_SIZE, HIDDEN, gain=LOGIT_STD)
    scale = np.ones(VOCAB_SIZE)
    scale[: len(CONTROL) + BYTES] = BYTE_SCALE
    scale[: len(CONTROL)] = 0.0
    scale[CONTROL.index(END)] = END_SCALE
    return weight * scale[:, None]


def tensors() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its name on the hub, bfloat16."""
    draws = Draws(SEED)
    arrays = {"model.embed_tokens.weight": draws.uniform((VOCAB_SIZE, HIDDEN), 1.0)}
    for layer in range(LAYERS):
        for name, array in layer_tensors(draws, layer):
            arrays[f"model.layers.{layer}.{name}"] = array
    arrays["model.final_layernorm.weight"] = np.ones(HIDDEN)
    arrays["lm_head.weight"] = head(draws)
    return {name: torch.from_numpy(array).to(torch.bfloat16).contiguous() for name, array in arrays.items()}
