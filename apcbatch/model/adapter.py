"""A LoRA of peft, merged into the weights of a checkpoint while they are loaded.

A weight becomes W + scale * B A in float32: each product and each sum is rounded, and the sum over the rank is in
ascending order, so that no bit depends on the device or on a BLAS library. Packing rounds it once more.

Invariants: what adapter_config.json says and what the tensors are must agree, by their headers alone, before memory is
taken. A tensor without a weight in the model, and a key that would change the computation otherwise, is refused by its
name. Importing this module does not load torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.model.encoded import device_of_codes, mode_beside, quantization_of
from apcbatch.model.families import family_of, load_model_config, quantised_weights
from apcbatch.model.feed_forward import Mixture
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.locate import ADAPTER
from apcbatch.model.name_patterns import Patterns
from apcbatch.model.weight_files import INDEX, SINGLE, WeightFiles
from apcbatch.option_values import brief
from apcbatch.regular_files import digest_of, identity

if TYPE_CHECKING:
    import torch

    from apcbatch.config import Config

WEIGHTS = "adapter_model.safetensors"
MOST_RANK = 1 << 14
_ITEMS = {"cpu": 1 << 15, "cuda": 1 << 24}  # of a weight at once; on the host in one thread
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MERGE = "merge it into its base model with peft (merge_and_unload), and give that folder as --model"
# Keys that are read, and those that change nothing; as in peft, fan_in_fan_out does so for these families.
_KNOWN = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias",
          "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern",
          "init_lora_weights", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
          "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "eva_config")  # fmt: skip
# What stands before `layers.` in the names of transformers 4 and 5, of text and multimodal models.
_ROOTS = ("", "model.", "backbone.", "model.language_model.", "language_model.model.", "language_model.")
_NAME = re.compile(r"((?:base_model\.model\.)?(.+?)(?:\.base_layer)?)\.lora_[AB]\.weight")
_Shapes = Mapping[str, tuple[int, ...]]
# What a LoRA is added to: (weight, expert of A and B, rows of B, matrix in a weight of experts or None, first row).
_Part = tuple[str, int, slice, int | None, int]


class Adapter:
    """The LoRA of one folder: tensors A (experts * rank, in) and B (out, rank * experts), with one expert for a matrix.
    config: of the model that it is merged into. digest: of its files. All methods raise ModelError."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.digest = adapter_digest(folder)
        self._folder, self._config, self._family = folder, config, family_of(config)
        self._rules = _Rules(folder / ADAPTER)
        with WeightFiles(folder, WEIGHTS) as files:
            self._tensors = files.tensors
        self._modules: dict[tuple[str, str], str] = {}  # names of A and B -> name of their module in peft
        for name, stored in self._tensors.items():
            if (match := _NAME.fullmatch(name)) is None:
                others = "embeddings, biases, whole tensors (modules_to_save, save_embedding_layers), several adapters"
                raise self._wrong(name, f"is no lora_A.weight or lora_B.weight; DoRA, {others} are not supported")
            pair = f"{match[1]}.lora_A.weight", f"{match[1]}.lora_B.weight"
            if (other := next((one for one in pair if one not in self._tensors), None)) is not None:
                raise self._wrong(name, f"lacks {other:.120}; download the adapter again")
            if stored.dtype not in _DTYPES:
                raise self._wrong(name, f"has dtype {stored.dtype}; expected one of {', '.join(_DTYPES)}")
            self._modules[pair] = match[2]
        if not self._modules:
            raise ModelError(f"{folder / WEIGHTS} has no tensors; expected lora_A and lora_B of some weights")
        self._parts: dict[str, list[tuple[tuple[str, str], int, float, _Part]]] = {}  # names, experts, scale, part
        self._factors: dict[str, torch.Tensor] = {}

    @property
    def described(self) -> str:
        """The adapter in words."""
        said = f"LoRA, r {self._rules.rank}, digest {self.digest[:12]}"
        return f"the adapter {self._folder} ({said}) is added to the weights when they are loaded"

    def bind(self, shapes: _Shapes) -> None:
        """Find the weights that the tensors belong to. shapes: of the model's weights, by their names here."""
        self._parts.clear()
        taken: dict[tuple[object, ...], str] = {}
        for pair in self._modules:
            key, (out, columns), experts, parts = self._place(pair, shapes)
            rank, scale = self._rules.scale_of(key)
            for name, expected in zip(pair, ((experts * rank, columns), (out, rank * experts)), strict=True):
                if (found := self._tensors[name].shape) != expected:
                    said = f"{list(found)}; expected {list(expected)} for {brief(key)} of rank {rank}"
                    raise self._wrong(name, f"has shape {said}")
            for part in parts:
                if (other := taken.setdefault((part[0], *part[3:]), pair[0])) != pair[0]:
                    raise self._wrong(pair[0], f"adapts {part[0]:.120} again, after {other:.120}")
                self._parts.setdefault(part[0], []).append((pair, experts, scale, part))
        self._check_whole(shapes)

    def read(self) -> None:
        """Read the tensors that `bind` has checked."""
        import torch

        with WeightFiles(self._folder, WEIGHTS) as files:
            for name, stored in self._tensors.items():
                data = bytearray(stored.num_bytes)
                files.read_into(stored, memoryview(data))
                tensor = torch.frombuffer(data, dtype=getattr(torch, _DTYPES[stored.dtype])).view(stored.shape)
                if not bool(tensor.isfinite().all()):
                    raise self._wrong(name, "has NaN or an infinite number; download the adapter again")
                self._factors[name] = tensor
        if adapter_digest(self._folder) != self.digest:
            raise ModelError(f"{self._folder} changed while it was read; run again once nothing writes to it")

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Add the LoRA to a weight. Returns the sum in float32, in the memory of a float32 weight; a weight that has no
        LoRA is returned as it is."""
        parts = self._parts.get(name, ())
        out = weight.float() if parts else weight
        for pair, experts, scale, (_, expert, rows, matrix, row) in parts:
            a, b = (self._factors[one] for one in pair)
            a = a.view(experts, -1, a.shape[1])[expert].to(out.device).float()
            b = b.view(len(b), -1, experts)[rows, :, expert].t().to(out.device).float().contiguous()  # (rank, rows)
            target = out if matrix is None else out[matrix]
            step = max(1, _ITEMS[out.device.type] // a.shape[1])
            for begin in range(0, b.shape[1], step):
                columns = b[:, begin : begin + step, None]  # (rank, rows, 1)
                total = columns[0] * a[0]
                for k in range(1, len(a)):
                    total += columns[k] * a[k]
                target[row + begin : row + begin + columns.shape[1]] += total.mul_(scale)
        return out

    def _place(self, pair: tuple[str, str], shapes: _Shapes) -> tuple[str, tuple[int, ...], int, list[_Part]]:
        """Return what a LoRA adapts, as peft calls it, the shape and the number of its matrices, and their parts of
        weights. Experts are packed or not, in the adapter and in the checkpoint."""
        key = module = self._modules[pair]
        shape: tuple[int, ...] = (0, 0)
        ours, prefix, kind = self._ours(module)
        rest, count, parts = ours.removeprefix(f"{prefix}."), 1, list[_Part]()
        if ours == self._family.embedding or (ours == self._family.head and self._config.tie_word_embeddings):
            raise self._wrong(pair[0], "adapts the embeddings, or a head tied to them, which is not supported")
        if kind and (match := re.fullmatch(r"experts(?:\.([0-9]{1,6})\.(\w+))?|(in|out)put_linear", rest)):
            f, h = kind.expert.columns, kind.latent or self._config.hidden_size
            names = (*kind.expert.inputs, kind.expert.output)
            last, packed = len(names) - 1, kind.stacked or ("experts.gate_up_proj", "experts.down_proj")
            number, name, side = match.groups()
            if number:
                experts = [expert for expert in [int(number)] if expert < kind.experts]
                which = [i for i in range(last + 1) if names[i] == name]
            else:
                experts, count = list(range(kind.experts)), kind.experts
                parameters = ("weight",) if side else ("gate_up_proj" if last > 1 else names[0], "down_proj")
                keys = [f"{module}.{one}" for one in parameters]
                keys = [one for one in keys if one in self._rules.parameters] or keys
                is_first = pair[0].endswith(".base_layer.lora_A.weight")  # peft nests the first parameter
                key = keys[0 if is_first else -1]
                which = [last] if side == "out" or key.endswith(".down_proj") else list(range(last))
                if self._rules.is_old:  # before 0.19 the layout was another
                    raise self._wrong(pair[0], f"is of packed experts; expected peft_version 0.19 on in {ADAPTER}")
            shape = (h, f) if which == [last] else (len(which) * f, h)
            for expert, i in itertools.product(experts, which):
                of, rows = 0 if number else expert, slice(None) if number or i == last else slice(i * f, i * f + f)
                if (weight := f"{prefix}.{packed[i == last]}") in shapes:
                    parts.append((weight, of, rows, expert, i * f if i < last else 0))
                else:
                    parts.append((f"{prefix}.experts.{expert}.{names[i]}.weight", of, rows, None, 0))
        elif weight := next((one for one in (f"{ours}.weight", f"{ours}.layer.weight") if one in shapes), ""):
            shape, parts = shapes[weight], [(weight, 0, slice(None), None, 0)]
            key = module if self._rules.targets(module) else f"{module}.weight"
        if not parts or len(shape) != 2 or not all(part[0] in shapes for part in parts):
            base = self._rules.reader.values.get("base_model_name_or_path")
            expected = "the adapter's base model" + (f", {brief(base)}," if base else "")
            raise self._wrong(pair[0], f"is of no projection of the model; expected {expected} as --model")
        if not (self._rules.targets(module) if key == module else key in self._rules.parameters):
            raise self._wrong(pair[0], f"is not among what {ADAPTER} targets; they must agree")
        return key, shape, count, parts

    def _ours(self, module: str) -> tuple[str, str, Mixture | None]:
        """Return a module's name here, and the mixture of experts that it is part of, after its name."""
        layers = f"{self._family.layers}."
        root = next((root for root in _ROOTS if module.startswith(f"{root}layers.")), None)
        ours = module.removeprefix("language_model.") if root is None else layers + module[len(f"{root}layers.") :]
        number = re.match(r"([0-9]{1,5})\.", ours.removeprefix(layers))
        if number is not None and int(number[1]) < self._config.num_layers:
            for block in self._config.layer(int(number[1])):
                prefix = f"{layers}{number[1]}.{block.name}"
                if isinstance(block.kind, Mixture) and ours.startswith(f"{prefix}."):
                    return ours, prefix, block.kind
        return ours, "", None

    def _check_whole(self, shapes: _Shapes) -> None:
        """Raise ModelError if a projection of a layer is a target by its name and has no tensors. Experts and routers
        are left out, as they are no modules of transformers 5."""
        layers = f"{self._family.layers}."
        root = next((one.partition("layers.")[0] for one in self._modules.values() if "layers." in one), "model.")
        for weight in (one for one, shape in shapes.items() if len(shape) == 2 and one not in self._parts):
            _, prefix, kind = self._ours(weight)
            module = f"{root}layers.{weight.removeprefix(layers).removesuffix('.weight')}"
            is_routed = kind and weight.startswith((f"{prefix}.experts.", f"{prefix}.{kind.router}."))
            if weight.startswith(layers) and not (is_routed or self._rules.takes_all) and self._rules.targets(module):
                what = f"has no tensors for {module:.120}, which {ADAPTER} targets; they must agree"
                raise ModelError(f"{self._folder / WEIGHTS} {what}: download the adapter again")

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self._folder / WEIGHTS}: tensor {name:.120} {what}")


class _Names:
    """Modules that a key of adapter_config.json names: by the ends of their names, by one pattern, or, with `read`, by
    patterns that each have a value."""

    def __init__(self, reader: ConfigReader, key: str, read: Any = None) -> None:
        self._where, value = f"{reader.path}: {key}", reader.values.get(key) or []
        self.values: dict[str, Any] = {}
        if read is not None:
            self.values = {rf"(?:.*\.)?(?:{one})$": read(reader.below(key), one) for one in reader.below(key).values}
        elif isinstance(value, str):
            self.values = {f"(?:{value})$": None}
        elif not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise reader.wrong(key, value, "a list of names, or a pattern")
        self.names = frozenset(value if isinstance(value, list) else ())
        self._patterns: Patterns | None = None
        self.pattern("")  # which refuses a bad one

    def __contains__(self, name: str) -> bool:
        ends = (name[match.end() :] for match in re.finditer(r"^|\.", name))
        return any(end in self.names for end in ends) or self.pattern(name) is not None

    def pattern(self, name: str) -> str | None:
        """Return the first pattern that matches a name."""
        try:
            self._patterns = self._patterns or Patterns(regular=self.values)
            return self._patterns.matching(name)
        except ValueError as error:
            raise ModelError(f"{self._where}: {error}; {_MERGE}") from None


class _Rules:
    """What adapter_config.json says. reader: of its content. parameters: those that are adapted, by their names.
    is_old: peft_version is missing or below 0.19."""

    def __init__(self, path: Path) -> None:
        self.reader = reader = ConfigReader(path, read_model_json(path))
        reader.require("peft_type", None, "LORA")
        reader.require("bias", "none", "none")
        reader.require("init_lora_weights", True, True, False, None, "gaussian", "eva", "orthogonal")
        for key, value in reader.values.items():
            if value and key not in _KNOWN:
                raise reader.wrong(key, value, f"a LoRA without it; {_MERGE}")
        self._is_rslora = reader.flag("use_rslora", False)
        self.rank, self._alpha = reader.integer("r", 8, maximum=MOST_RANK), reader.number("lora_alpha", 8)
        self._ranks = _Names(reader, "rank_pattern", partial(ConfigReader.integer, default=8, maximum=MOST_RANK))
        self._alphas = _Names(reader, "alpha_pattern", partial(ConfigReader.number, default=8))
        self.takes_all = reader.values.get("target_modules") == "all-linear"
        self._modules, self._left_out = _Names(reader, "target_modules"), _Names(reader, "exclude_modules")
        self.parameters = _Names(reader, "target_parameters")
        layers = reader.values.get("layers_to_transform")
        layers = [layers] if type(layers) is int else layers or []
        if not isinstance(layers, list) or not all(type(one) is int for one in layers):
            raise reader.wrong("layers_to_transform", layers, "numbers of layers")
        self._layers = frozenset(layers)
        reader.require("layers_pattern", None, "layers", ["layers"], [], "", None)
        self.is_old = not re.match(r"0\.(19|[2-9][0-9]|[0-9]{3})|[1-9]", str(reader.values.get("peft_version")))

    def scale_of(self, key: str) -> tuple[int, float]:
        """Return the rank and the factor of what is added to a module or a parameter."""
        rank = self._ranks.values.get(self._ranks.pattern(key) or "", self.rank)
        alpha = self._alphas.values.get(self._alphas.pattern(key) or "", self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether a module has a LoRA."""
        number, names = re.search(r"\.layers\.([0-9]{1,6})\.", module), self._modules.names
        if self._layers and names and module not in names and not (number and int(number[1]) in self._layers):
            return False  # as in peft, numbers of layers count where the end of a name is given
        return (self.takes_all or module in self._modules) and module not in self._left_out


def about_weights(folder: Path, config: Config) -> Iterator[str]:
    """Yield sentences about quantised weights of a model folder and about an adapter. Raises ModelError."""
    mode = mode_beside(config.weights, config.adapter)
    device = device_of_codes(config.device, config.gpus) if quantization_of(folder) else "cpu"
    if (sentence := quantised_weights(folder, mode, device, config.dtype)) is not None:
        yield sentence
    if config.adapter is not None:
        import torch

        from apcbatch.model.causal_lm import check_sizes

        model = load_model_config(folder)
        adapter = Adapter(Path(config.adapter), model)
        if any((folder / name).exists() for name in (SINGLE, INDEX)):
            with family_of(model).checkpoint(folder, torch.device("cpu"), adapter) as checkpoint:
                check_sizes(checkpoint, model)
        yield adapter.described


def adapter_digest(folder: Path) -> str:
    """Return the xxh3-128, in hex, of the files of an adapter, read again only if they changed. Raises ModelError."""
    return _digest_of(*((path, identity(path)) for path in (folder / ADAPTER, folder / WEIGHTS)))


@lru_cache(maxsize=4)
def _digest_of(*files: tuple[Path, tuple[int, ...] | None]) -> str:
    try:
        return digest_of(path for path, _ in files)
    except OSError as error:
        files_of = f"{ADAPTER} and {WEIGHTS}, as peft's save_pretrained writes them (no pickles)"
        said = f"{error.strerror}; expected the folder of one adapter, with {files_of}"
        raise ModelError(f"{error.filename or files[-1][0]} cannot be read: {said}") from None
