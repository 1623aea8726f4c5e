"""Quantised checkpoints: each format's weights against an oracle, equal bits; answers against the decoded folder; what
is refused, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine
from apcbatch.cli.program import main
from apcbatch.errors import ModelError
from apcbatch.kernels.encoded_rows import Codes, EncodedRows
from apcbatch.model import name_patterns
from apcbatch.model.encoded import Encoded, Keeping, check_floating
from apcbatch.model.encoded import weights_of as stored_weights
from apcbatch.model.families import family_of, load_model_config, quantised_weights
from apcbatch.model.locate import DEMO_DIR
from apcbatch.model.name_patterns import Patterns
from apcbatch.model.own_dtype import own_dtype
from apcbatch.model.quantization import Codec
from apcbatch.model.weight_files import FLOATING, StoredTensor, WeightFiles
from apcbatch.model.weights import Checkpoint
from tests.effort import table
from tests.model.folders import REMOVED, SINGLE, copy_of, refused, sharded, weights_of, with_config, with_weights
from tests.model.parity import answers
from tests.model.quantized import BLOCKS, FLOAT, FORMATS, INT, Written, compressed, named, quantised

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
WEIGHT, CPU = "m.weight", torch.device("cpu")
SHAPES = [(40, 72), (37, 71), (300, 260), (8, 2048), (1, 32), (16, 8), (3, 40, 64)]


def taken(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shape: tuple[int, ...]) -> Any:
    """The weight that the package makes of tensors, and the digest."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    keeping = Keeping("encoded", "cpu", "bfloat16")
    with Checkpoint(folder, CPU, keeping=keeping) as one, Checkpoint(folder, CPU) as checkpoint:
        kept, weight = one.take(WEIGHT, shape), checkpoint.take(WEIGHT, shape)
        assert checkpoint.sizes() == {WEIGHT: weight.nbytes}, "by which layers are shared among devices"
        if isinstance(kept, EncodedRows):
            assert_same(kept.decoded(), weight)
        digest = checkpoint.finish()
        assert one.finish() == digest
        return weight, digest


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but for those of NaN; an infinite number is NaN."""
    assert found.dtype == expected.dtype == torch.bfloat16 and found.shape == expected.shape
    is_number = expected.isfinite()
    assert torch.equal(found.isfinite(), is_number)
    assert torch.equal(found[is_number].view(torch.int16), expected[is_number].view(torch.int16))


@pytest.mark.parametrize("which", FORMATS)
def test_a_weight_is_its_codes_times_its_scales(which: str, tmp_path: Path) -> None:
    """Catches a wrong order of bits, of groups or of operations, a second rounding, a short last block or group, and a
    NaN code, a zero, a tiny or a huge scale that gives a number which looks right."""
    form, rng = FORMATS[which], np.random.default_rng(3)
    for *experts, rows, columns in SHAPES:
        if experts and form.only_2d:
            continue
        shape = (*experts, -(-rows // form.rows) * form.rows, -(-columns // form.columns) * form.columns)
        for extreme in (0.0, 0.3):
            written = form.write(shape, rng, extreme)
            found, _ = taken(tmp_path / "m", form.config, dict(named(WEIGHT, written.tensors)), shape)
            assert_same(found, written.expected)


def of_transformers(written: Written, config: dict[str, Any]) -> torch.Tensor:
    """What transformers decodes of blocks of FP8."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    one = Fp8Dequantize(None)._dequantize_one(written.tensors[""], written.tensors["_scale_inv"], torch.bfloat16)
    return one.reshape(written.codes.shape)


def of_compressed_tensors(written: Written, config: dict[str, Any]) -> torch.Tensor:
    """What the package compressed_tensors decodes, in the scales' dtype."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = config["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**{**group, "targets": ["Linear"]})
    kind = compressors.BaseCompressor.get_value_from_registry(config["format"])
    state = {f"weight{end}": tensor for end, tensor in written.tensors.items()}
    return kind.decompress(state, scheme)["weight"].bfloat16()


@pytest.mark.slow
@table("which, oracle, shape", [
    *((which, of_transformers, shape) for which in ("fp8 blocks", "fp8 exponents")
      for shape in ((256, 384), (128, 128), (3, 128, 256))),
    *((which, of_compressed_tensors, shape) for which, shape in (
        ("float channel", (37, 72)), ("float block", (32, 40)), ("naive tensor", (37, 71)),
        ("int8 channel", (37, 71)), ("int8 group, zeros", (37, 72)), ("pack int4", (37, 96)),
        ("pack int4, zeros", (37, 96)), ("pack int8 channel, zeros", (37, 71)), ("nvfp4", (37, 96)),
        ("mxfp4 packed", (37, 96)))),
])  # fmt: skip
def test_a_weight_is_what_other_readers_make_of_it(
    which: str, oracle: Callable[..., torch.Tensor], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Catches a misunderstanding of a format that the tests' own writer shares."""
    form = FORMATS[which]
    written = form.write(shape, np.random.default_rng(4), 0.0)
    found, _ = taken(tmp_path / "m", form.config, dict(named(WEIGHT, written.tensors)), shape)
    assert_same(found, oracle(written, form.config))


WHOLE_GROUPS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4,
                "linear_value_head_dim": 32, "linear_num_value_heads": 4}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family, sizes, preset", [
    ("qwen3_5", WHOLE_GROUPS, "W4A16_ASYM"), ("qwen3_5", WHOLE_GROUPS, "NVFP4A16"), ("qwen3_next", {}, "FP8_DYNAMIC"),
    ("mamba", {}, "FP8_BLOCK"), ("nemotron_h", {}, "W8A8"), ("jamba", {}, "FP8"),
])  # fmt: skip
def test_a_folder_that_compressed_tensors_writes_is_read(
    family: str, sizes: dict[str, int], preset: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches names, shapes and keys of config.json that the tool writes otherwise than these tests do: each weight
    that it compresses in a model of transformers equals what it decompresses."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family, **sizes), dtype=torch.bfloat16)
    groups = {"group_0": quantization.preset_name_to_scheme(preset, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head", "re:.*gate$", "re:.*router.*"])
    quantization.apply_quantization_config(model, config)
    draw = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        if name.endswith("_global_scale"):
            tensor.data.fill_(100)
        elif name.endswith("_scale"):
            tensor.data = (torch.rand(tensor.shape, generator=draw) / 100 + 0.001).to(tensor.dtype)
        elif name.endswith("weight_zero_point"):
            tensor.data = torch.randint(-3, 3, tensor.shape, generator=draw).to(tensor.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    compressor.decompress_model(model)
    ours = family_of(load_model_config(tmp_path)).checkpoint(tmp_path, torch.device("cpu"))
    with ours as checkpoint, WeightFiles(tmp_path) as files:
        encoded = {name: one for name, one in stored_weights(files).items() if isinstance(one, Encoded)}
        expected = {name.removeprefix("model."): one.detach() for name, one in model.named_parameters()}
        assert len(encoded) > 7
        for name, one in encoded.items():
            plain = name.removeprefix("model.").removeprefix("backbone.")
            assert_same(checkpoint.take(name, one.shape), expected[plain if plain in expected else name].bfloat16())


@pytest.mark.parametrize("kind, group, columns, has_zeros, is_kept", [
    ("fp8", 128, 2048, False, True), ("fp8", 100, 2048, False, False), ("fp8", 128, 2056, False, False),
    ("int8", 0, 4096, False, True), ("int8", 16, 2048, False, False), ("int8", 32, 2048, True, False),
    ("int8", 100, 1000, False, False), ("int4", 32, 2048, True, True), ("int4", 128, 2064, False, False),
])  # fmt: skip
def test_what_stays_encoded_on_cuda(kind: str, group: int, columns: int, has_zeros: bool, is_kept: bool) -> None:
    """Catches a format that the CUDA kernels read wrongly or slowly, and one that a device before them should read."""
    dtype, bits = {"fp8": ("F8_E4M3", 8), "int8": ("I8", 8), "int4": ("I32", 4)}[kind]
    codec = Codec("", "", dtype, bits, "rows", ("_scale",), block=(1, group), zero="_zero_point" * has_zeros)
    scales = {"scales": ("", StoredTensor(Path(), "BF16", (), 0, 0))}
    weight = Encoded(Path(), "BF16", (256, columns), 0, codec, scales)
    assert Keeping("encoded", "cuda", "bfloat16").keeps(WEIGHT, weight) == is_kept
    assert not Keeping("encoded", "other", "bfloat16").keeps(WEIGHT, weight)


SIZES = {"hidden_size": 64, "intermediate_size": 96}
HEADS = SIZES | {"num_attention_heads": 4}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("which, family, sizes, kept", [
    ("fp8 blocks", "qwen3_5_moe", {}, "fp8"), ("fp8 small blocks", "mamba2", {}, ""),
    ("fp8 exponents", "bamba", {}, "fp8"), ("float channel", "granitemoehybrid", {}, "fp8"),
    ("pack int4", "jamba", {}, "int4"), ("pack int4, zeros", "qwen3_next", {}, "int4"), ("gptq", "lfm2", HEADS, "int4"),
    ("gptq_v2 int8, ordered", "lfm2_moe", HEADS, ""), ("awq", "falcon_h1", SIZES, "int4"),
    ("modelopt NVFP4", "nemotron_h", {}, ""), ("mxfp4", "qwen3_5", SIZES, ""), ("int8 channel", "mamba", {}, "int8"),
    ("modelopt FP8", "falcon_mamba", {}, "fp8"),
])  # fmt: skip
def test_answers_are_those_of_the_decoded_folder(
    which: str, family: str, sizes: dict[str, int], kept: str, device: str, tiny_checkpoint: Checkpoints,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a weight of a family that is decoded otherwise, or not, while it is loaded or when it is multiplied:
    tokens and log-probabilities, cold and from a snapshot, are equal, in both dtypes and where a weight and its scales
    lie in several files."""
    encoded, decoded = quantised(tiny_checkpoint(family, **sizes), tmp_path, which)
    stored = [one for one in weights_of(encoded).values() if one.dtype not in (torch.bfloat16, torch.float32)]
    assert len(stored) > 3, "nothing is quantised"
    kinds, runs = set[str](), EncodedRows.runs

    def noted(rows: EncodedRows, multiple: int) -> Iterator[tuple[int, int, Codes | torch.Tensor]]:
        for begin, end, part in runs(rows, multiple):
            kinds.update([part.kind] if isinstance(part, Codes) else [])
            yield begin, end, part

    monkeypatch.setattr(EncodedRows, "runs", noted)
    for dtype in ("bfloat16", "float32"):
        options = {"dtype": dtype, "device": device, "weights": "encoded"}
        found, expected = (answers(folder, **options) for folder in (encoded, decoded))
        assert found[1] == expected[1] and found[0] != expected[0]
    assert device == "cuda" or kinds == ({kept} if kept else set())
    kinds.clear()
    assert answers(encoded, dtype="float32", device=device, weights="decoded") == found and not kinds
    several = sharded(encoded, tmp_path / "sharded")
    assert answers(several, dtype="float32", device=device) == found


def test_packed_experts_and_a_tied_head_are_decoded(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches experts in one tensor whose scales are read as those of one matrix, a quantised head that is compared
    with the embedding before it is decoded, and a multimodal prefix that is lost."""
    form, rng, shape = FORMATS["fp8 small blocks"], np.random.default_rng(5), (4, 32, 36)
    single = tiny_checkpoint("qwen3_5_moe", tie_word_embeddings=True)
    weights = weights_of(single)
    one = "model.layers.0.mlp.experts.0.gate_proj.weight"
    count = sum(name.startswith("model.layers.0.mlp.experts.") for name in weights) // 3
    shape = (count, 2 * weights[one].shape[0], weights[one].shape[1])
    changes: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for layer in range(4):
        packs = {"gate_up_proj": shape, "down_proj": (count, shape[2], shape[1] // 2)}
        gone = {name: REMOVED for name in weights if name.startswith(f"model.layers.{layer}.mlp.experts.")}
        for name, size in packs.items():
            written, whole = form.write(size, rng, 0.0), f"model.layers.{layer}.mlp.experts.{name}"
            changes[True] |= gone | dict(named(whole, written.tensors))
            changes[False] |= gone | {whole: written.expected}
    head = form.write(tuple(weights["model.embed_tokens.weight"].shape), rng, 0.0)
    changes[True] |= dict(named("model.embed_tokens.weight", head.tensors))
    changes[True] |= {name: tensor.clone() for name, tensor in named("lm_head.weight", head.tensors)}
    changes[False]["model.embed_tokens.weight"] = head.expected
    folders = {key: with_weights(single, tmp_path / str(key), one) for key, one in changes.items()}
    encoded = with_config(folders[True], tmp_path / "encoded", quantization_config=form.config)
    expected = answers(folders[False], dtype="bfloat16")[1]
    assert answers(encoded, dtype="bfloat16")[1] == expected


@pytest.mark.slow
def test_a_run_of_the_program_answers_as_the_decoded_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches a command that refuses or misreads a quantised folder, and one that does not say what it is."""
    encoded, decoded = quantised(DEMO_DIR, tmp_path, "float channel")
    given = tmp_path / "in.jsonl"
    given.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    said = []
    for folder in (encoded, decoded):
        out = folder.parent / f"{folder.name}.jsonl"
        options = ["--max-tokens", "8", "--threads", "1", "--logprobs"]
        assert main(["run", str(given), "-o", str(out), "--model", str(folder), "--device", "cpu", *options]) == 0
        (record,) = map(json.loads, out.read_text().splitlines())
        said.append(record["response"]["body"]["choices"])
    assert said[0] == said[1]
    words = "FP8 (compressed-tensors)"
    for command in (["doctor", "--device", "cpu"], ["plan", str(given)], ["show", str(given)]):
        capsys.readouterr()
        main([*command, "--model", str(encoded)])
        shown = capsys.readouterr()
        assert words in shown.out + shown.err, command
        main([*command, "--model", str(decoded)])
        shown = capsys.readouterr()
        assert words not in shown.out + shown.err


def test_a_nan_code_is_an_error_and_no_answer(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches the codes 0x7F and 0xFF of e4m3 read as numbers: a plausible answer from a damaged weight."""
    from apcbatch import Request

    encoded, _ = quantised(tiny_checkpoint("mamba"), tmp_path, "modelopt FP8")
    tensors = load_file(encoded / SINGLE)
    name = "backbone.layers.0.mixer.in_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, encoded / SINGLE)
    engine = Engine(encoded, pool_size_bytes=1 << 20, dtype="bfloat16")
    (result,) = engine.run([Request("r", [1, 2, 3], max_tokens=3)])
    engine.close()
    assert result.error is not None and "NaN" in str(result.error)


def test_the_digest_is_that_of_the_stored_bytes(tmp_path: Path) -> None:
    """Catches snapshots of other stored weights that hit: of another code, scale, zero or format, such as GPTQ's other
    one, whose tensors are alike; or a digest that depends on the folder."""
    form, shape = FORMATS["pack int4, zeros"], (16, 32)
    tensors = dict(named(WEIGHT, form.write(shape, np.random.default_rng(1), 0.0).tensors))
    _, digest = taken(tmp_path / "a", form.config, tensors, shape)
    assert taken(tmp_path / "b", form.config, tensors, shape)[1] == digest
    for name in (f"{WEIGHT}_packed", f"{WEIGHT}_scale", f"{WEIGHT}_zero_point"):
        changed = tensors[name].clone()
        changed.view(torch.uint8)[0, 0] ^= 1
        assert taken(tmp_path / "a", form.config, tensors | {name: changed}, shape)[1] != digest
    tensors = dict(named(WEIGHT, FORMATS["gptq"].write(shape, np.random.default_rng(1), 0.0).tensors))
    kinds = ({"checkpoint_format": kind} for kind in ("gptq", "gptq_v2"))
    assert len({taken(tmp_path / "a", GPTQ | kind, tensors, shape)[1] for kind in kinds}) == 2


def broken(which: str, changes: dict[str, Any], said: str, **config: Any) -> tuple[Any, ...]:
    return which, changes, said, config


I32, U8 = torch.int32, torch.uint8
BROKEN = [
    broken("fp8 blocks", {"_scale_inv": REMOVED}, r"tensor m.weight lacks tensor m.weight_scale_inv"),
    broken("fp8 blocks", {"_scale_inv": torch.ones(1, 2)},
           r"m.weight_scale_inv has dtype F32 and shape \[1, 2\]; expected .* \[1, 1\], as tensor m.weight has shape"),
    broken("fp8 blocks", {"_scale_inv": torch.ones(1 << 31, 0)}, r"_scale_inv has .* \[2147483648, 0\]; expected"),
    broken("fp8 blocks", {"_scale_inv": torch.ones(1, 1, dtype=I32)}, "m.weight_scale_inv has dtype I32"),
    broken("fp8 blocks", {"_scale_inv": torch.tensor([[float("nan")]])}, "_scale_inv has NaN.* tensor m.weight$"),
    broken("fp8 blocks", {"_scale_inv": torch.tensor([[float("inf")]])}, "m.weight_scale_inv has NaN, an infinite"),
    broken("fp8 exponents", {"_scale_inv": torch.tensor([[255]], dtype=U8)}, "m.weight_scale_inv has NaN"),
    broken("fp8 blocks", {"_scale": torch.ones(1, 1)}, "has scales twice, m.weight_scale_inv and m.weight_scale"),
    broken("float channel", {"_scale_inv": torch.ones(1, 1)}, "m.weight_scale_inv belongs to no weight"),
    broken("int8 channel", {"_zero_point": torch.ones(8, 1, dtype=torch.int8)}, "m.weight_zero_point belongs to no"),
    broken("fp8 blocks", {"": torch.ones(8, 32)}, "m.weight_scale_inv belongs to no weight .*m.weight has dtype F32"),
    broken("fp8 blocks", {"": torch.ones(8, 32, dtype=torch.int8)}, "has dtype I8; expected m.weight of dtype F8_E4M3"),
    broken("fp8 blocks", {"": torch.ones(32).to(torch.float8_e4m3fn)}, r"weight has .*\[32\]; expected .*\[out, in\]"),
    broken("fp8 blocks", {".input_scale": torch.tensor(float("nan"))}, "m.input_scale has NaN"),
    broken("fp8 blocks", {".input_scale": torch.ones(7)}, r"m.input_scale .* \[7\]; expected .* \[1\]"),
    broken("fp8 blocks", {}, "leaves out 'm'; they must agree", modules_to_not_convert=["m"]),
    broken("float channel", {}, "m.weight has dtype F8_E4M3, and .* leaves out", ignore=["re:^m$"]),
    broken("pack int4", {"_shape": torch.tensor([8, 24])}, r"_shape gives the shape \[8, 24\]; expected \[8, 32\]"),
    broken("pack int4", {"_shape": torch.tensor([8, 1 << 62])}, r"_shape gives the shape"),
    broken("pack int4", {"_shape": torch.tensor([8, -8])}, r"_shape gives the shape"),
    broken("pack int4", {"_shape": torch.ones(9, dtype=torch.int64)}, r"_shape gives the shape"),
    broken("pack int4", {"_shape": REMOVED}, "lacks tensor m.weight_shape"),
    broken("pack int4", {"": torch.ones(8, 32)}, "m.weight_packed is the same weight as tensor m.weight"),
    broken("pack int4, zeros", {"_zero_point": REMOVED}, "lacks tensor m.weight_zero_point"),
    broken("pack int4, zeros", {"_zero_point": torch.ones(2, 2, dtype=I32)},
           r"m.weight_zero_point has .* \[2, 2\]; expected I32 \[1, 2\]"),
    broken("pack int4, ordered", {"_g_idx": torch.full((32,), 1, dtype=I32)}, "has group 1; expected 0 to 0"),
    broken("pack int4, ordered", {"_g_idx": REMOVED}, "weight_packed lacks tensor m.weight_g_idx"),
    broken("gptq", {".g_idx": REMOVED}, "m.qweight lacks tensor m.g_idx", desc_act=True),
    broken("fp8 blocks", {"": torch.ones(8, 0).to(torch.float8_e4m3fn), "_scale_inv": torch.ones(1, 0)},
           r"m.weight has shape \[8, 0\]; expected no zero"),
    broken("gptq", {".g_idx": torch.full((32,), -1, dtype=I32)}, "m.g_idx has group -1; expected 0 to 0 of tensor"),
    broken("gptq", {".g_idx": torch.zeros(40, dtype=I32)}, r"m.g_idx .*shape \[40\]; expected I32 \[32\]"),
    broken("gptq", {".qzeros": REMOVED}, "m.qweight lacks tensor m.qzeros"),
    broken("gptq", {".scales": torch.ones(3, 8).half()}, r"m.scales .*\[3, 8\]; expected .* \[1, 8\]"),
    broken("nvfp4", {"_global_scale": torch.zeros(1)}, "m.weight_global_scale has .* zero to divide by"),
    broken("nvfp4", {"_global_scale": REMOVED}, "lacks tensor m.weight_global_scale"),
    broken("mxfp4", {"_scales": torch.full((8, 1), 255, dtype=U8)}, "m.weight_scales has NaN"),
    broken("awq", {".qzeros": torch.ones(1, 2, dtype=I32)}, r"m.qzeros .*expected I32 \[1, 1\]"),
]  # fmt: skip


@table("which, changes, said, config", BROKEN)
def test_a_broken_weight_is_a_sentence(
    which: str, changes: dict[str, Any], said: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Catches a missing, surplus, doubled or wrong scale, zero, group or shape that is read anyway, a traceback, and an
    error that does not name both tensors."""
    form = FORMATS[which]
    tensors: dict[str, Any] = form.write((8, 32), np.random.default_rng(1), 0.0).tensors | changes
    kept = {end: tensor for end, tensor in tensors.items() if tensor is not REMOVED}
    with pytest.raises(ModelError, match=said) as raised:
        taken(tmp_path / "m", form.config | config, dict(named(WEIGHT, kept)), (8, 32))
    assert len(str(raised.value)) < 700 and str(raised.value).isprintable()


def test_a_plain_weight_that_is_a_target_is_refused(tmp_path: Path) -> None:
    """Catches a weight that was left out of a folder that declares it quantised by its name."""
    config = compressed("float-quantized", **FLOAT, strategy="channel")
    for target in ("re:m.*", "m"):
        config["config_groups"]["group_0"]["targets"] = [target]
        with pytest.raises(ModelError, match=f"tensor m.weight has dtype F32, and .* has the target '{target[-2:]}?"):
            taken(tmp_path / "m", config, {WEIGHT: torch.ones(8, 32)}, (8, 32))
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    found, _ = taken(tmp_path / "m", config, {WEIGHT: torch.ones(8, 32)}, (8, 32))
    assert found.dtype == torch.float32


@table("first, targets, others", [
    ("m", ["re:.*m$"], ["re:.*n$"]), ("m", ["m"], ["Linear"]), ("m", ["re:.*m$"], ["Linear"]),
    ("m", ["m"], ["re:.*"]), ("m", ["re:.*m$"], ["re:.*|z"]), ("embed_tokens", ["Embedding"], ["Linear"]),
])  # fmt: skip
def test_each_group_has_its_format(first: str, targets: list[str], others: list[str], tmp_path: Path) -> None:
    """Catches the first group's codec for all weights, and of several targets that match a module another than the tool
    takes: a name before expressions, these as they are sorted and not as groups are listed, and a class last."""
    rng, both = np.random.default_rng(2), {first: FORMATS["pack int4"], "n": FORMATS["float channel"]}
    groups = {name: form.config["config_groups"]["group_0"] | {"targets": targets if name == first else others,
              "format": form.config["format"]} for name, form in both.items()}  # fmt: skip
    written = {name: form.write((8, 32), rng, 0.0) for name, form in both.items()}
    save_file({key: tensor for name, one in written.items()
               for key, tensor in named(f"{name}.weight", one.tensors)}, tmp_path / SINGLE)  # fmt: skip
    for names in (groups, reversed(groups)):
        config = {"quant_method": "compressed-tensors", "format": "mixed-precision",
                  "config_groups": {name: groups[name] for name in names}}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        with Checkpoint(tmp_path, torch.device("cpu")) as checkpoint:
            for name, one in written.items():
                assert_same(checkpoint.take(f"{name}.weight", (8, 32)), one.expected)


@table("which, changes, beside", [
    ("pack int4", {}, {"quantization_status": "frozen"}), ("nvfp4", {".output_global_scale": torch.ones(1)}, {}),
    ("float channel", {".output_zero_point": torch.zeros(1).to(torch.float8_e4m3fn)}, {}),
    *(("int8 channel", {f".{one}_{end}": torch.zeros(1)}, {})
      for one in ("input", "q", "k", "v") for end in ("scale", "zero_point", "global_scale")),
])  # fmt: skip
def test_what_changes_no_weight_is_read(
    which: str, changes: dict[str, torch.Tensor], beside: dict[str, str], tmp_path: Path
) -> None:
    """Catches a folder of quantised attention, activations or KV, or of a tool's older status, that is refused."""
    form = FORMATS[which]
    written = form.write((8, 32), np.random.default_rng(2), 0.0)
    tensors = dict(named(WEIGHT, written.tensors | changes))
    assert_same(taken(tmp_path / "m", form.config | beside, tensors, (8, 32))[0], written.expected)


SUPPORTED = "expected fp8, fbgemm_fp8, modelopt, .*or the unquantised checkpoint"
GPTQ, AWQ = FORMATS["gptq"].config, FORMATS["awq"].config
PACK, MODELOPT = FORMATS["pack int4"].config, FORMATS["modelopt NVFP4"].config


def grouped(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return compressed(layout, **INT | {"strategy": "group", "group_size": 32} | weights)


@table("config, said", [
    *(({"quant_method": name}, f"quantised with '{name}'.*{SUPPORTED}")
      for name in ("bitsandbytes", "aqlm", "HQQ", "torchao", "auto-round", "a-new-one")),
    *(({name: True}, f"with 'bitsandbytes'; {SUPPORTED}") for name in ("load_in_8bit", "load_in_4bit")),
    *((config, "by a method that it does not name") for config in ("fp8", [1], {"bits": 4}, {"load_in_4bit": False})),
    *(({"quant_method": method}, "quantised ") for method in (["x"] * 10_000, "x" * 10_000)),
    (BLOCKS | {"fmt": "e5m2"}, 'fmt is .*expected "e4m3"'),
    *((BLOCKS | {"weight_block_size": block}, "weight_block_size is .*; expected the rows and columns")
      for block in ([128], [0, 128], [128.0, 128], 128, [1 << 40, 1])),
    *((GPTQ | {"bits": bits}, "bits is .*expected 4 or 8") for bits in (2, 3, 5)),
    (GPTQ | {"bits": 1 << 80}, "bits is .*expected an integer"),
    *((GPTQ | {"group_size": size}, "group_size is .*expected an integer") for size in (0, -2, 1.5, "128")),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    (GPTQ | {"format": "gptq_v2"}, "format is 'gptq_v2'; expected the checkpoint_format"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, r"dynamic.\+:\.\* is .*expected no other choices"),
    (AWQ | {"version": "gemv"}, "version is 'gemv'; expected \"gemm\""), (AWQ | {"bits": 8}, "bits is 8; expected 4"),
    (AWQ | {"zero_point": False}, "zero_point is False"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; expected one of FP8"),
    (MODELOPT | {"group_size": 32}, "group_size is 32; expected null|group_size is 32; expected 16"),
    (PACK | {"format": "marlin-24"}, "format is 'marlin-24'; expected float-quantized"),
    (PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24"),
    (PACK | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is .*; expected no transforms"),
    (PACK | {"quantization_status": "initialized"}, "quantization_status is 'initialized'"),
    (PACK | {"config_groups": {}}, "config_groups is .*; expected groups"),
    (grouped(num_bits=3), "num_bits is 3; expected 4 or 8"), (grouped(group_size=0), "group_size is 0; expected"),
    (grouped(strategy="token"), "strategy is 'token'"), (grouped(dynamic=True), "dynamic is True"),
    (grouped(type="float"), "format is 'pack-quantized'; expected"),
    (grouped("nvfp4-pack-quantized", type="float", group_size=32), "group_size is 32; expected 16"),
    (PACK | {"ignore": "lm_head"}, "ignore is 'lm_head'; expected a list of names"),
    (PACK | {"ignore": ["re:(a+)+$" + "a" * 600]}, "has 606 characters; the most is 512"),
    (PACK | {"ignore": ["re:(a"]}, "is no regular expression"),
    (PACK | {"ignore": [r"re:(a)\1"]}, "has flags, references or others"),
    (PACK | {"ignore": [f"re:{i}" for i in range(2000)]}, "has 2,000 patterns; the most is"),
])  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(
    config: Any, said: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a method, a format or a choice that passes, or floods the page, and weights that are taken without their
    scales. No weight is looked at: there is none."""
    folder = with_config(tiny_checkpoint("mamba"), tmp_path / "m", quantization_config=config)
    (folder / SINGLE).unlink()
    refused(folder, said)
    with pytest.raises(ModelError, match=said):
        load_model_config(folder)


@table("changes, beside, said", [
    ({"compression_config": FORMATS["float channel"].config}, {}, None),
    ({"text_config": {"quantization_config": {"quant_method": "aqlm"}}}, {}, "text_config.quantization_config says"),
    ({"quantization_config": BLOCKS, "text_config": {"quantization_config": GPTQ}}, {}, "text_config.*disagree"),
    ({"quantization_config": None}, {}, None), ({"quantization_config": {}}, {}, None),
    ({"quantization_config": MODELOPT | {"quant_algo": None}}, {}, None),
    ({}, {"hf_quant_config.json": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}}, None),
    ({"quantization_config": GPTQ}, {"quantize_config.json": {"bits": 4, "group_size": 32}}, None),
    ({"quantization_config": GPTQ}, {"quantize_config.json": {"bits": 8}},
     "quantization_config.bits is 4, and .*quantize_config.json: bits is 8; they must agree"),
    ({"quantization_config": MODELOPT | {"ignore": ["a", "b"]}},
     {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["b", "a"]}}}, None),
    ({"quantization_config": MODELOPT | {"ignore": ["a"]}},
     {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["b"]}}}, "they must agree"),
    ({"quantization_config": MODELOPT}, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
     "quant_algo is 'NVFP4', and .*hf_quant_config.json: quantization.quant_algo is 'FP8'"),
    ({"quantization_config": PACK}, {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
     "quant_method is 'compressed-tensors', and .*hf_quant_config.json is a file of modelopt; they must agree"),
    ({}, {"hf_quant_config.json": {"quantization": {"quant_algo": "W4A8_AWQ"}}},
     "hf_quant_config.json: quantization.quant_algo is 'W4A8_AWQ'"),
    ({}, {"quantize_config.json": {"bits": 3, "group_size": 128}}, "quantize_config.json: bits is 3"),
])  # fmt: skip
def test_what_files_declare_agrees(
    changes: dict[str, Any], beside: dict[str, Any], said: str | None, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a declaration under another key or in another file that is not read, two that differ, and a null, which
    some tools write for weights that are not quantised, that is refused."""
    folder = with_config(tiny_checkpoint("mamba"), tmp_path / "m", **changes)
    for name, values in beside.items():
        (folder / name).write_text(json.dumps(values))
    if said is None:
        assert load_model_config(folder) == load_model_config(tiny_checkpoint("mamba"))
        return
    with pytest.raises(ModelError, match=said):
        load_model_config(folder)


@table("pattern, name, expected", [
    ("re:.*lm_head", "lm_head", True), ("re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
    ("re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False), ("re:visual.*", "model.visual.blocks.0", False),
    (r"re:.*experts\.\d+\.(gate|up)_proj", "model.layers.0.mlp.experts.17.up_proj", True),
    (r"re:.*experts\.\d{1,2}\.up", "experts.123.up", False), (r"re:^(?!.*experts).*$", "layers.0.experts.1", False),
    (r"re:^(?!.*experts).*$", "layers.0.mlp", True), (r"re:.*(^|\.)mlp\.", "layers.0.mlp.up_proj", True),
    (r"re:.*($|\.)q_proj", "model.q_proj", True), ("re:(?:.*)(^lm_head|mlp)", "model.mlp", True),
    ("layers.*.mlp", "model.layers.0.mlp", False), ("re:model.layers.[0-3].*", "model.layers.4.mlp", False),
    ("re:model.layers.[^4].*", "model.layers.4.mlp", False), ("re:(a|b)*c", "ababc", True), ("re:a+?b?c", "aac", True),
    (r"re:\bmodel\b.*\bmlp\b", "model.mlp", True), (r"re:.*\bgate", "model.up_gate", False),
    ("re:a.{1,2}d", "abbd", True), ("re:a.{1,2}d", "abbbd", False), ("re:a.{2,}d", "abd", False),
    ("lm_head", "lm_head", True), ("mlp.gate", "model.layers.0.mlp.gate", True), ("gate", "mlp.gate_proj", False),
    ("model.layers.0", "model.layers.0.mlp.up_proj", True), ("*.mixer.conv1d", "backbone.layers.1.mixer.conv1d", True),
    ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True), ("model.layers.0*", "model.layers.1", False),
])  # fmt: skip
def test_a_pattern_matches_what_its_tool_matches(pattern: str, name: str, expected: bool) -> None:
    """Catches a name that is left out or quantised against what the folder says."""
    regular = pattern.startswith("re:")
    patterns = Patterns((), [pattern[3:]]) if regular else Patterns([pattern])
    assert (patterns.matching(name) is not None) == expected


@table("pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "(a|aa)+$", ".*.*.*.*.*.*.*.*.*x", "((a*)*)*b", "(?=(a+)*d)"])
def test_no_pattern_takes_exponential_time(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder that keeps the processor busy for hours by its patterns (for `re` 30 letters take minutes, and
    these 400 would never end), and steps that are not counted."""
    patterns = Patterns((), [pattern])
    assert patterns.matching("a" * 400 + "!") is None
    monkeypatch.setattr(name_patterns, "MOST_STEPS", 100)
    with pytest.raises(ValueError, match="takes more than 100 steps"):
        for _ in range(100):
            patterns.matching("a" * 400 + "!")


@table("dtype, meant", [
    ("F8_E8M0", "8-bit floating point"), ("I8", "int8"), ("F4", "packed floating point"),
    ("F6_E2M3", "packed floating point"), ("I64", None), ("BOOL", None), *((name, "") for name in FLOATING),
])  # fmt: skip
def test_a_dtype_is_named_by_what_it_usually_stands_for(dtype: str, meant: str | None) -> None:
    """Fault: a checkpoint of integers is called quantised, or a dtype that torch does not have yet passes."""
    assert FLOATING == {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    if meant == "":
        check_floating(Path("w"), "t", dtype)
        return
    with pytest.raises(ModelError) as raised:
        check_floating(Path("w"), "t" * 200, dtype)
    start = f"w: tensor {'t' * 120} has dtype {dtype}; expected one of F64, F32, F16, BF16"
    assert str(raised.value).startswith(start)
    assert str(raised.value)[len(start) :].partition(":")[0] == (
        f", as {meant} weights have it" if meant is not None else ""
    )


@table("dtype, meant", [
    (torch.float8_e4m3fn, "8-bit floating point"), (torch.float8_e5m2, "8-bit floating point"), (torch.int8, "int8"),
    (torch.uint8, "int8, or packed 4-bit"), (torch.int32, "packed integer"),
])  # fmt: skip
def test_quantised_tensors_without_a_word_are_refused(
    dtype: torch.dtype, meant: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: where config.json says nothing, a quantised matrix of the last layer is found only when the others are
    read; or a packed one is refused for its shape, which sends its reader to config.json."""
    name = "model.layers.3.mamba.out_proj.weight"
    single = tiny_checkpoint("jamba")
    matrix = weights_of(single)[name]
    said = f"as {meant} weights have it: config.json declares none"
    for number, packed in enumerate((matrix.to(dtype), matrix[:, ::4].contiguous().to(dtype))):
        folder = sharded(with_weights(single, tmp_path / f"a{number}", {name: packed}), tmp_path / f"b{number}")
        refused(folder, f"-of-00003.safetensors: tensor {name} has dtype .*{said}")


@table("declares", [False, True])
def test_no_tensor_is_read_before_all_are_known(
    declares: bool, tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: gigabytes are read before the first quantised tensor is met that is not declared, or that lacks scales."""

    def read(checkpoint: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "_read", read)
    name = "backbone.layers.1.mixer.out_proj.weight"
    single = tiny_checkpoint("mamba")
    folder = with_weights(single, tmp_path / "m", {name: weights_of(single)[name].to(torch.float8_e4m3fn)})
    folder = with_config(folder, tmp_path / "n", quantization_config=BLOCKS if declares else None)
    with pytest.raises(ModelError, match=f"tensor {name} (has dtype F8_E4M3; |lacks tensor {name}_scale_inv)"):
        Engine(folder, pool_size_bytes=1 << 20)


def test_a_file_that_is_left_over_changes_nothing(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a plain folder that is computed in bfloat16, or announced as quantised, for a file of its quantised
    twin."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    fingerprint = answers(folder, dtype=own_dtype(folder, warn=print))[0]
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert quantised_weights(folder, "auto", "cpu", "auto") is None
    assert answers(folder, dtype=own_dtype(folder, warn=print))[0] == fingerprint


def test_a_quantised_folder_is_computed_in_bfloat16(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches float32 by the dtype of its config or its norms, and a warning that float16 is rounded."""
    encoded, _ = quantised(tiny_checkpoint("mamba"), tmp_path, "pack int4")
    sentences: list[str] = []
    for dtype in ("float32", "float16", None):
        folder = with_config(encoded, tmp_path / str(dtype), dtype=dtype)
        assert own_dtype(folder, sentences.append) == "bfloat16"
    assert sentences == []


def test_doctor_and_plan_refuse_what_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Fault: doctor passes a model that no run takes, or plan forecasts a run that cannot be."""
    folder = with_config(DEMO_DIR, tmp_path / "m", quantization_config={"quant_method": "aqlm"})
    sentence = "quantised with 'aqlm'; expected fp8, "
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 1
    [line] = [one for one in capsys.readouterr().out.splitlines() if one.split()[1] == "model"]
    assert line.startswith("FAIL") and sentence in line
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert main(["plan", str(tmp_path / "in.jsonl"), "--model", str(folder)]) == 2
    assert sentence in capsys.readouterr().err
