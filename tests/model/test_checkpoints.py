"""The weights' files: one or several, whole or broken, with the tensors that config.json asks for or others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine, Request
from apcbatch.errors import ModelError, UsageError
from apcbatch.layout import SSM, StateLayout
from apcbatch.model import weights
from apcbatch.model.devices import make_arena
from apcbatch.model.weights import Checkpoint
from tests.effort import is_full, table
from tests.model.folders import (
    REMOVED,
    SINGLE,
    copy_of,
    header_of,
    sharded,
    weight_map_of,
    weights_of,
    with_config,
    with_weights,
    write_index,
    write_safetensors,
)
from tests.tiny import VOCAB, load_oracle

Checkpoints = Callable[..., Path]
PROMPT = torch.randint(1, VOCAB, (21,), generator=torch.Generator().manual_seed(5)).tolist()

pytestmark = pytest.mark.usefixtures("one_thread")


def answer(folder: Path) -> tuple[str, list[int], list[float] | None]:
    """(the fingerprint, the tokens and their log-probabilities) of one greedy answer."""
    engine = Engine(folder, pool_size_bytes=1 << 20, max_running=2)
    (result,) = engine.run([Request("r", PROMPT, max_tokens=6, ignore_eos=True, logprobs=True)])
    engine.close()
    assert result.error is None
    return engine.fingerprint, result.token_ids, result.logprobs


def refused(folder: Path, sentence: str) -> None:
    """The folder is refused in a sentence of sane length."""
    with pytest.raises(ModelError, match=sentence) as caught:
        Engine(folder, pool_size_bytes=1 << 20, max_running=2)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


def kinds_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint; below full effort, one of each kind: of any layer, of any expert."""
    weights = weights_of(folder)
    kinds = {name if is_full() else re.sub(r"\d+", "N", name): name for name in weights}
    return {name: weights[name] for name in kinds.values()}


# Several files


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
@pytest.mark.parametrize("shards", [1, 3])
def test_several_files_are_the_same_model(
    family: str, shards: int, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a sharded checkpoint is not found, loses a file, or has another fingerprint, so that no snapshot hits."""
    single = tiny_checkpoint(family)
    assert answer(sharded(single, tmp_path / "ours", shards)) == answer(single)


def test_files_that_transformers_has_cut_are_read(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: an index as transformers writes it is not understood."""
    single = tiny_checkpoint("jamba")
    load_oracle(single).save_pretrained(tmp_path / "m", max_shard_size="40KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    assert answer(tmp_path / "m") == answer(single)


def test_a_file_beside_the_index_is_not_opened(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: with an index, model.safetensors of another model is read, or pickled weights are."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    (folder / SINGLE).write_bytes(b"not weights")
    (folder / "pytorch_model.bin").write_bytes(b"not weights either")
    assert answer(folder) == answer(tiny_checkpoint("mamba"))


@table("name", [
    "../../etc/passwd", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "../model.safetensors",
    "a\0b.safetensors",
    "model.bin", ".hidden.safetensors", "x" * 300 + ".safetensors", "\ud800.safetensors", "a\nb.safetensors",
    "model.safetensors\n",
])  # fmt: skip
def test_the_index_names_plain_files_alone(name: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a checkpoint's index leads to a file outside its folder, or to a name that no file system takes."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    weight_map = weight_map_of(folder)
    write_index(folder, weight_map | {sorted(weight_map)[0]: name})
    refused(folder, "weight_map names .*; expected plain file names such as model-00001-of-00002.safetensors")


@table("weight_map", [None, [], "x", 3, {"a": 1}, {"a": None}])
def test_an_index_without_files_is_refused(weight_map: object, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: an AttributeError or TypeError for an index of another shape."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    write_index(folder, weight_map)
    refused(folder, "weight_map is missing; expected an object of tensor names and file names")


def test_an_index_that_names_nothing_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: no file, no error."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    write_index(folder, {})
    refused(folder, "tensor backbone.embeddings.weight is missing")


def test_a_missing_shard_is_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: an incomplete download runs on what is there, or is said to hold no weights at all."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m", 9)
    names = [f"model-0000{number}-of-00009.safetensors" for number in (2, 4, 5, 9)]
    (folder / names[0]).unlink()
    refused(folder, f"m lacks 1 of the 9 files of weights that model.*index.json names: {names[0]}; download the model")
    for name in names[1:3]:
        (folder / name).unlink()
    refused(folder, f"m lacks 3 of the 9 files of weights .* names: {', '.join(names[:3])}; download the model")
    (folder / names[3]).unlink()
    refused(folder, f"m lacks 4 of the 9 files of weights .* names: {', '.join(names[:3])}, ..; download the model")


def test_a_tensor_is_where_the_index_says(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a tensor of one file in the place of the one of the same name that the index means."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    weight_map = weight_map_of(folder)
    name = next(name for name, file in sorted(weight_map.items()) if file.startswith("model-00001"))
    write_index(folder, weight_map | {name: "model-00003-of-00003.safetensors"})
    refused(folder, f"model-00003-of-00003.safetensors: tensor {name} is missing; .*index.json lists it there")
    write_index(folder, weight_map | {"of.nothing": "model-00003-of-00003.safetensors"})
    refused(folder, "model-00003-of-00003.safetensors: tensor of.nothing is missing")


# Tensors


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_each_tensor_must_be_there(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a missing tensor is taken as zeros or as whatever the memory holds."""
    single = tiny_checkpoint(family)
    for number, name in enumerate(kinds_of(single)):
        folder = with_weights(single, tmp_path / str(number), {name: REMOVED})
        refused(folder, rf"tensor {name} is missing; expected one of shape \[\d+")


def test_the_first_names_of_mamba_are_the_same_model(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a checkpoint with the embedding's name in the mamba_ssm package, which transformers loads, lacks a tensor;
    or it answers under another fingerprint; or a second embedding beside it is passed over."""
    new, former = "backbone.embeddings.weight", "backbone.embedding.weight"
    ours = tiny_checkpoint("mamba")
    embedding = weights_of(ours)[new]
    folder = with_weights(ours, tmp_path / "m", {new: REMOVED, former: embedding})
    assert answer(folder) == answer(ours)
    refused(with_weights(ours, tmp_path / "both", {former: embedding}), f"tensor '{former}' is not part of this arch")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_each_tensor_has_its_shape(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a tensor of another shape is read as if it had the right one."""
    single = tiny_checkpoint(family)
    for number, (name, tensor) in enumerate(kinds_of(single).items()):
        for wrong in (torch.cat([tensor, tensor[:1]]), tensor.unsqueeze(0)):
            folder = with_weights(single, tmp_path / f"{number}-{wrong.dim()}", {name: wrong})
            refused(folder, rf"tensor {name} has shape \[.*\]; expected \[.*\] by config.json")


@table("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_are_floating_point(dtype: torch.dtype, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: quantised weights without their scales are taken for the weights themselves."""
    single = tiny_checkpoint("mamba")
    for number, name in enumerate(("backbone.embeddings.weight", "backbone.layers.1.mixer.dt_proj.weight")):
        folder = with_weights(single, tmp_path / str(number), {name: weights_of(single)[name].to(dtype)})
        refused(folder, f"tensor {name} has dtype .*; expected one of F64, F32, F16, BF16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_float_is_read(dtype: torch.dtype, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: weights in the files' dtype are misread: they answer as the same numbers in float32 do, under another
    fingerprint."""
    single = tiny_checkpoint("jamba")
    weights = weights_of(single)
    stored = with_weights(single, tmp_path / "a", {name: weights[name].to(dtype) for name in weights})
    same = with_weights(single, tmp_path / "b", {name: weights[name].to(dtype).float() for name in weights})
    assert answer(stored)[1:] == answer(same)[1:]
    assert answer(stored)[0] != answer(same)[0]


@table("name", ["backbone.layers.2.norm.weight", "extra", "x" * 500])
def test_a_surplus_tensor_is_refused(name: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a layer that config.json does not count is left out in silence."""
    folder = with_weights(tiny_checkpoint("mamba"), tmp_path / "m", {name: torch.zeros(36)})
    refused(
        folder,
        f"tensor '{name:.50}.* is not part of this architecture; check architectures and the layer sizes",
    )


def test_several_surplus_tensors_are_counted(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: only the first is told, as if the others were in use."""
    folder = with_config(tiny_checkpoint("mamba"), tmp_path / "m", num_hidden_layers=1)
    refused(folder, r"tensor 'backbone\.layers\.1\.\S+' \(and 9 more\) is not part of this architecture")


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_tied_weights_are_one_tensor(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a tied head that is stored as well is refused, one that differs is passed over, an untied one that is
    missing is made up."""
    tied = tiny_checkpoint(family, tie_word_embeddings=True)
    key = "backbone.embeddings.weight" if family == "mamba" else "model.embed_tokens.weight"
    embedding = weights_of(tied)[key]
    twice = with_weights(tied, tmp_path / "twice", {"lm_head.weight": embedding})
    assert answer(twice)[1:] == answer(tied)[1:]
    other = with_weights(tied, tmp_path / "other", {"lm_head.weight": embedding + 1})
    refused(other, "lm_head.weight differs from the embedding although config.json ties them")
    untied = with_config(tied, tmp_path / "untied", tie_word_embeddings=False)
    refused(untied, "tensor lm_head.weight is missing")


def test_another_number_is_another_fingerprint(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: snapshots of other weights under the same path hit: each tensor counts, and so does its name."""
    single = tiny_checkpoint("mamba")
    fingerprints = {answer(single)[0]}
    weights = weights_of(single)
    for number, (name, tensor) in enumerate(weights.items()):
        changed = with_weights(
            single,
            tmp_path / str(number),
            {name: tensor.nextafter(torch.tensor(9.0))},
        )
        fingerprints.add(answer(changed)[0])
    first, second = "backbone.layers.0.mixer.D", "backbone.layers.1.mixer.D"
    swapped = {first: weights[second], second: weights[first]}
    fingerprints.add(answer(with_weights(single, tmp_path / "swapped", swapped))[0])
    assert len(fingerprints) == len(weights) + 2


@table("family, key, value", [
    ("mamba", "vocab_size", 10**9), ("mamba", "hidden_size", 1 << 29), ("mamba", "state_size", 1 << 30),
    ("mamba", "conv_kernel", 1 << 30), ("mamba", "intermediate_size", 1 << 30), ("mamba", "time_step_rank", 1 << 30),
    ("jamba", "num_experts", 1 << 30), ("jamba", "intermediate_size", 1 << 30), ("jamba", "mamba_expand", 10**7),
    ("jamba", "mamba_d_state", 1 << 30), ("jamba", "num_hidden_layers", 10_000), ("jamba", "vocab_size", 1 << 30),
])  # fmt: skip
def test_sizes_that_the_weights_do_not_have_allocate_nothing(
    family: str, key: str, value: int, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: config.json alone decides what is allocated: the answer was that the states need so many TiB, and a
    smaller --pool-size, or no answer at all. The tensor that contradicts it is named."""
    refused(with_config(tiny_checkpoint(family), tmp_path / "m", **{key: value}),
            r"tensor \S+ (has shape .*; expected .* by config.json|is missing)")  # fmt: skip


# Headers


def test_a_folder_without_weights_is_a_sentence(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: pickled weights are opened, or nothing says why nothing is."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    (folder / SINGLE).unlink()
    refused(folder, "does not exist: .*m holds no weights; expected safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "m holds pickle weights, which are never opened; save them as safetensors; expected safetensors")


@table("has_config", [True, False])
@table("name, sentence", [
    ("jamba-q4_k.gguf", r"holds GGUF weights \(jamba-q4_k.gguf\), which are not read; give the checkpoint"),
    ("adapter_config.json", r"is an adapter \(LoRA, adapter_config.json\), not a model; merge it into its base model"),
    ("adapter_model.safetensors", "is an adapter .* merge it into its base model with peft"),
    ("pytorch_model-00001-of-00002.bin", "holds pickle weights, which are never opened; save them as safetensors"),
])  # fmt: skip
def test_what_is_no_model_is_named(
    name: str, sentence: str, has_config: bool, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a GGUF file or a LoRA adapter in place of a model: "has no tokenizer", "holds no weights"."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    (folder / SINGLE).unlink()
    if not has_config:
        (folder / "config.json").unlink()
    (folder / name).write_bytes(b"GGUF")
    refused(folder, sentence)
    refused(folder / name, rf"model '.*{name}' is a file; expected a model folder: .*{sentence}")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 6\n"


@table("files, sentence", [
    ({"adapter_config.json": b"{}"}, "has adapter_config.json beside the weights of a whole model.* merge it into"),
    ({SINGLE: POINTER}, "model.safetensors is a pointer of git-LFS, without the content; run `git lfs pull` there"),
    ({SINGLE: POINTER, "tokenizer.json": POINTER, "picture.png": POINTER}, "m: model.safetensors and 1 more are "),
    ({SINGLE: None, "checkpoint-90/x": b"", "checkpoint-100/x": b"", "checkpoint-9": b"", "training_args.bin": b""},
     "holds the checkpoints of a training and no weights; give the newest, .*/m/checkpoint-100;"),
    ({SINGLE: None, "training_args.bin": b""}, "m holds no weights; expected safetensors"),
    ({SINGLE: None, "consolidated.safetensors": b""}, "m holds consolidated.safetensors, and no"),
    ({SINGLE: None, "config.json": None, "refs/main": b"", "snapshots/a": b""}, "Hugging Face cache; give m,"),
])  # fmt: skip
def test_what_lies_in_the_place_of_weights_is_named(
    files: dict[str, bytes | None], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: an adapter beside weights is left out in silence; a pointer is "not a whole safetensors file"; the state
    of a training is "pickle weights"; shards without their index, or safetensors of another name, are "no weights"."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content or b"")
        if content is None:
            (folder / name).unlink()
    refused(folder, sentence)


def test_a_transposed_convolution_is_of_mlx(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a checkpoint that was converted to MLX has a wrong shape, and nothing says which to take."""
    folder = tiny_checkpoint("mamba")
    name, tensor = next((name, one) for name, one in weights_of(folder).items() if name.endswith("conv1d.weight"))
    shape = rf"\[{len(tensor)}, {tensor.shape[2]}, 1\]; expected \[{len(tensor)}, 1, {tensor.shape[2]}\]"
    refused(
        with_weights(folder, tmp_path / "m", {name: tensor.transpose(1, 2)}), f"{shape} by config.json; .* MLX: give"
    )


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@table("header, length", [
    (b"{}", 1 << 60), (b"{}", 1 << 63), (b"{}", 3), (b"{}", 0), (b"", -1), (b"{", -1), (b"[1]", -1), (b"\xff", -1),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", -1),
    (b'{"__metadata__":{"a":1}}', -1),
    (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
     -1),
])  # fmt: skip
def test_a_broken_header_is_a_sentence(
    header: bytes, length: int, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a length that is allocated, a recursion, an error without the file's name."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    write_safetensors(folder / SINGLE, header, b"\0" * 32, length)
    refused(folder, r"model.safetensors is not a whole safetensors file \(.*\); copy it again")


@table("broken", [
    entry("F32", [97, 36], 0, 1), entry("F32", [97, 36], 0, 1 << 60), entry("F32", [97, 36], 1 << 60, 1 << 61),
    entry("F32", [97, 36], 16, 0), entry("F32", [-97, 36], 0, 13968),
    entry("F32", [1 << 62, 1 << 62], 0, 13968), entry("F32", [1 << 62], 0, 0), entry("F16", [97, 36], 0, 13968),
    {"dtype": "F32"}, 3, entry("F32", [97, 36] + [1] * 7, 0, 13968), entry("F32", [97, 36], 0, 13968) | {"more": 1},
    entry("F32", [True], 0, 4), entry("F32", "ab", 0, 4), entry(4, [1], 0, 4), entry("F32", [1], True, 5),
])  # fmt: skip
def test_a_tensors_place_is_inside_the_file(broken: object, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a tensor beyond the file, over another one, of negative or overflowing size is read."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    header, data = header_of(folder / SINGLE)
    write_safetensors(folder / SINGLE, header | {"backbone.embeddings.weight": broken}, data)
    refused(folder, r"model.safetensors is not a whole safetensors file \(.*\); copy it again")


@table("name, dtype", [
    ("a\x1b[31m\nb", "F32"), ("\u202e", "F32"), ("a" * 100_000, "F32"), ("a", "F" * 100_000), ("a", "\x1b[31m\n"),
])  # fmt: skip
def test_the_words_of_a_header_are_short_and_printable(
    name: str, dtype: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a name or a dtype goes into a message with its control characters, or in all of its length."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    header, data = header_of(folder / SINGLE)
    write_safetensors(folder / SINGLE, header | {name: entry(dtype, [0], len(data), len(data))}, data)
    refused(folder, r"model.safetensors is not a whole safetensors file \(its header .*\); copy it again")
    shards = sharded(tiny_checkpoint("mamba"), tmp_path / "shards", 2)
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name + "\x9b"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    refused(shards, "is missing; model.safetensors.index.json lists it there")


def test_a_header_has_bounded_sizes(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: 1.4 million tensors of no elements took 1.8 GiB; so may lists of numbers, brackets, or many files."""
    place = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    many = b",".join(b'"%d":%s' % (number, place) for number in range(500_000))
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    for header, sentence in (
        (b"{%s}" % many, "the headers of the weights have 3,500,000 values, the most is 3,145,728"),
        (b'{"a":[%s0]}' % (b"0," * (4 << 20)), "have 4,194,306 values, the most is 3,145,728"),
        (b'{"__metadata__":{"a":"%s"}}' % (b"x" * (32 << 20)), "have 33,554,457 bytes, the most is 33,554,432"),
    ):
        write_safetensors(folder / SINGLE, header, b"")
        tracemalloc.start()
        refused(folder, rf"model.safetensors is not a whole safetensors file \(.*{sentence}\); copy it again")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        tracemalloc.stop()
    shards = sharded(tiny_checkpoint("mamba"), tmp_path / "shards", 3)
    for path in shards.glob("*.safetensors"):
        header, data = header_of(path)
        write_safetensors(path, header | {"__metadata__": {"a": "x" * (11 << 20)}}, data)
    refused(shards, r"model-00003-of-00003.safetensors is .*the headers of the weights have .* the most is")


def test_a_tensor_stands_in_one_file(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: which of two tensors of a name is used depends on the order of the files."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m", 2)
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor + 1}, second)
    refused(folder, f"tensor {name} stands in {first} and in {second}; expected each tensor in one file")


def test_a_file_cut_anywhere_is_a_sentence(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: half a download is read as if the rest were zeros; so is one with something behind its end."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    data = (folder / SINGLE).read_bytes()
    for end in (0, 7, 8, 9, 500, len(data) // 2, len(data) - 1):
        (folder / SINGLE).write_bytes(data[:end])
        refused(folder, "model.safetensors is not a whole safetensors file")
    (folder / SINGLE).write_bytes(data + b"x")
    refused(folder, "model.safetensors is not a whole safetensors file")


def test_a_scalar_is_no_vector(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a tensor without dimensions breaks the reader instead of being refused by its shape."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    tensors = weights_of(folder) | {"backbone.norm_f.weight": torch.tensor(1.0)}
    save_file(tensors, folder / SINGLE)
    refused(folder, r"tensor backbone.norm_f.weight has shape \[\]; expected \[36\]")


def test_no_thread_reads_on_behind_a_checkpoint(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: threads that read the rest of a checkpoint which was found to be another one's."""
    monkeypatch.setattr(weights, "AHEAD_BYTES", 1)  # so that a thread waits for a take, with tensors left to read

    def reading() -> int:
        return sum(thread.name == "apcbatch-ahead" for thread in threading.enumerate())

    before = reading()
    folder = tiny_checkpoint("mamba")
    with Checkpoint(folder, torch.device("cpu")) as checkpoint:
        checkpoint.take(*next((name, tuple(one.shape)) for name, one in weights_of(folder).items()))
        assert reading() > before
    assert reading() == before


def test_the_memory_of_a_tensor_is_its_own_while_it_is_used(tmp_path: Path) -> None:
    """Fault: a tensor of which only a part is still used is overwritten by the next one; memory that is used again
    grows with the file; a tensor lies on the mapped file."""
    names, size = [f"part.{number}" for number in range(64)], 1 << 17
    save_file({name: torch.full((size,), float(number)) for number, name in enumerate(names)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path, torch.device("cpu")) as checkpoint:
        kept, places = {}, set()
        for number, name in enumerate(names):
            tensor = checkpoint.take(name, (size,))
            places.add(tensor.data_ptr())
            if number % 3 == 0:
                kept[number] = tensor.view(2, -1)[1, -1000:]
        checkpoint.finish()
    assert all(bool((part == number).all()) for number, part in kept.items())
    assert len(places) < len(kept) + 16, "of 64 tensors, those that are kept, read ahead and unused"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_loading_takes_little_more_than_the_weights(
    dtype: str, stored: torch.dtype, tied: bool, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a tied embedding is in memory twice, or a converted copy of every matrix beside its packed form."""
    folder = tiny_checkpoint(
        "mamba", vocab_size=20_000, hidden_size=512, num_hidden_layers=24, tie_word_embeddings=tied
    )
    tensors = weights_of(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, tmp_path / SINGLE)
    code = """if True:
        import sys
        from apcbatch import Engine
        def peak():
            text = open("/proc/self/status").read()
            return 1024 * int(text.split("VmHWM:")[1].split()[0])
        Engine("demo", policy="none", pool_size_bytes=1 << 20, max_running=1).close()
        before = peak()
        Engine(sys.argv[1], dtype=sys.argv[2], policy="none", pool_size_bytes=1 << 20, max_running=1, draft=())
        print(peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path, dtype], capture_output=True, text=True, check=True)
    itemsize = getattr(torch, dtype).itemsize
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * itemsize
    largest = max(tensor.numel() for tensor in tensors.values()) * max(itemsize, stored.itemsize)
    assert int(done.stdout) < num_bytes + largest


def test_memory_that_the_system_does_not_give_is_counted() -> None:
    """Fault: a pool of exabytes ends in a traceback, or in a sentence with another size."""
    layout = StateLayout.of([SSM.part(0, (2, 3), "float32")])
    size = f"{layout.slot_bytes * 2.0**30:.1f}"
    with pytest.raises(UsageError, match=f"the {1 << 60} states .* need {size} GiB, which the system does not give"):
        make_arena(layout, 1 << 60, 0, [torch.device("cpu")], [range(1)])


def test_tensors_are_read_ahead_by_their_bytes_in_the_order_of_use(tiny_checkpoint: Checkpoints) -> None:
    """Fault: ten times as much memory is filled as was allowed, or the last layer comes first."""
    folder = tiny_checkpoint("mamba")
    with Checkpoint(folder, torch.device("cpu")) as checkpoint:
        sizes = checkpoint.sizes()
    assert sizes == {name: tensor.nbytes for name, tensor in weights_of(folder).items()}
    layers = [int(found[1]) for name in sizes if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers) and "layers" not in list(sizes)[-1]


def test_tensors_are_read_in_the_order_of_the_layers(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: the memory for reading ahead is full of what comes last; or the bytes of a tensor are those of another
    dtype, or of no number."""
    tensors = weights_of(tiny_checkpoint("mamba"))
    name, num_layers = "backbone.layers.1.mixer.D", len({one for one in tensors if one.endswith("mixer.D")})
    changed = {name: tensors[name].to(torch.bfloat16)}
    folder = with_weights(tiny_checkpoint("mamba"), tmp_path / "m", changed)
    with Checkpoint(folder, torch.device("cpu")) as checkpoint:
        sizes = checkpoint.sizes()
    assert sizes == {name: changed.get(name, tensor).nbytes for name, tensor in tensors.items()}
    layers = [int(name.split(".")[2]) if ".layers." in name else 99 for name in sizes]
    assert layers == sorted(layers) and set(layers) == {*range(num_layers), 99}
    packed = with_weights(folder, tmp_path / "packed", {name: torch.zeros(72, dtype=torch.int8)})
    with Checkpoint(packed, torch.device("cpu")) as checkpoint:
        assert sizes.keys() - checkpoint.sizes().keys() == {name}


def test_a_file_that_breaks_while_it_is_read_ends_its_threads(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a disk that fails leaves threads that read on."""
    name, closed = "backbone.norm_f.weight", []
    take = Mock(side_effect=OSError("the disk failed"))
    monkeypatch.setattr(
        weights, "Ahead", lambda *_, **options: Mock(take=take, close=lambda: closed.append(options["threads"]))
    )
    with (
        pytest.raises(OSError, match="the disk failed"),
        Checkpoint(tiny_checkpoint("mamba"), torch.device("cpu")) as checkpoint,
    ):
        checkpoint.take(name, (36,))
    assert closed == [1], "the processor reads and digests in one thread beside its own"
