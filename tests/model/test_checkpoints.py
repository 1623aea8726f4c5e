"""The weights' files: one or several, whole or broken, with the tensors that config.json asks for or others."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from apcbatch import Engine, Request
from apcbatch.errors import UsageError
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
    refused,
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
EMBEDDING, FORMER = "backbone.embeddings.weight", "backbone.embedding.weight"
OTHER_SIZE = r"tensor \S+ (has shape .*; expected .* by config.json|is missing)"

pytestmark = pytest.mark.usefixtures("one_thread")


def answer(folder: Path) -> tuple[str, list[int], list[float] | None]:
    """(the fingerprint, the tokens and their log-probabilities) of one greedy answer."""
    engine = Engine(folder, pool_size_bytes=1 << 20, max_running=2)
    (result,) = engine.run([Request("r", PROMPT, max_tokens=6, ignore_eos=True, logprobs=True)])
    engine.close()
    assert result.error is None
    return engine.fingerprint, result.token_ids, result.logprobs


# Several files


@pytest.mark.drawn(3)
@pytest.mark.parametrize("family, shards", [
    *((family, shards) for family in ("mamba", "falcon_mamba", "jamba") for shards in (1, 3)),
    ("jamba", "transformers"),
])  # fmt: skip
def test_several_files_are_the_same_model(
    family: str, shards: int | str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a sharded checkpoint, ours or one that transformers has cut, is not found, loses a file, or has another
    fingerprint, so that no snapshot hits; a file beside the index is opened."""
    single, folder = tiny_checkpoint(family), tmp_path / "m"
    if isinstance(shards, str):
        load_oracle(single).save_pretrained(folder, max_shard_size="40KB")
        assert len(list(folder.glob("*.safetensors"))) > 3
    else:
        sharded(single, folder, shards)
        (folder / SINGLE).write_bytes(b"not weights")
        (folder / "pytorch_model.bin").write_bytes(b"not weights either")
    assert answer(folder) == answer(single)


SHARD = "model-00003-of-00003.safetensors"


@table("listed, sentence", [
    *(({EMBEDDING: name}, "weight_map names .*; expected plain file names such as model-00001-of-00002.safetensors")
      for name in (
          "../../etc/passwd", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "../model.safetensors",
          "a\0b.safetensors", "model.bin", ".hidden.safetensors", "x" * 300 + ".safetensors", "\ud800.safetensors",
          "a\nb.safetensors", "model.safetensors\n",
      )),
    *((wrong, "weight_map is missing; expected an object of tensor names and file names")
      for wrong in (None, [], "x", 3, {"a": 1}, {"a": None})),
    ({}, "tensor backbone.embeddings.weight is missing"),
    ({EMBEDDING: SHARD}, f"{SHARD}: tensor {EMBEDDING} is missing; .*index.json lists it there"),
    *(({name: SHARD}, "is missing; model.safetensors.index.json lists it there")
      for name in ("of.nothing", "a\x1b[31m\nb\x9b", "\u202e\x9b", "a" * 100_000)),
])  # fmt: skip
def test_an_index_is_no_more_than_plain_files_that_have_its_tensors(
    listed: object, sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: an index leads to a file outside its folder, or to a name that no file system takes; one of another shape
    is an AttributeError or TypeError; a tensor of one file stands in the place of the one that the index means; a name
    goes into a message with its control characters, or in all of its length."""
    folder = sharded(tiny_checkpoint("mamba"), tmp_path / "m")
    write_index(folder, weight_map_of(folder) | listed if listed and isinstance(listed, dict) else listed)
    refused(folder, sentence)


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


# Tensors


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_each_tensor_must_be_there_in_its_shape(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a missing tensor is taken as zeros or as what the memory holds, one of another shape as if it had the
    right one."""
    single = tiny_checkpoint(family)
    weights = weights_of(single)
    kinds = {name if is_full() else re.sub(r"\d+", "N", name): name for name in weights}  # of any layer, of any expert
    for number, name in enumerate(kinds.values()):
        tensor = weights[name]
        for way, wrong in enumerate((REMOVED, torch.cat([tensor, tensor[:1]]), tensor.unsqueeze(0))):
            folder = with_weights(single, tmp_path / f"{number}-{way}", {name: wrong})
            said = r"is missing; expected one of shape \[\d+" if way == 0 else r"has shape \[.*\]; expected \[.*\] by"
            refused(folder, f"tensor {name} {said}")


def test_the_first_names_of_mamba_are_the_same_model(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a checkpoint with the embedding's name in the mamba_ssm package, which transformers loads, lacks a tensor;
    or it answers under another fingerprint."""
    ours = tiny_checkpoint("mamba")
    folder = with_weights(ours, tmp_path / "m", {EMBEDDING: REMOVED, FORMER: weights_of(ours)[EMBEDDING]})
    assert answer(folder) == answer(ours)


SURPLUS = "of this architecture; check architectures and the layer sizes"


@table("family, config, changes, sentence", [
    *(("mamba", {}, {name: lambda tensor, dtype=dtype: tensor.to(dtype)},
       f"tensor {name} has dtype .*; expected one of F64, F32, F16, BF16")
      for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
      for name in (EMBEDDING, "backbone.layers.1.mixer.dt_proj.weight")),
    *(("mamba", {}, {name: torch.zeros(36)}, f"tensor '{name:.50}.* is not part {SURPLUS}") for name in (
        "backbone.layers.2.norm.weight", "extra", "x" * 500, FORMER,
        "backbone.layers.0.mixer.in_proj.weight_scale_inv",  # converted to floating point, with the scales beside them
    )),
    ("mamba", {"num_hidden_layers": 1}, {}, r"tensor 'backbone\.layers\.1\.\S+' \(and 9 more\) is not part of this"),
    *(("mamba", {key: 1 << 30}, {}, OTHER_SIZE) for key in
      ("vocab_size", "state_size", "conv_kernel", "intermediate_size", "time_step_rank")),
    ("mamba", {"hidden_size": 1 << 29}, {}, OTHER_SIZE),
    *(("jamba", {key: 1 << 30}, {}, OTHER_SIZE) for key in
      ("num_experts", "intermediate_size", "mamba_d_state", "vocab_size")),
    ("jamba", {"mamba_expand": 10**7}, {}, OTHER_SIZE), ("jamba", {"num_hidden_layers": 10_000}, {}, OTHER_SIZE),
    ("mamba", {}, {"backbone.norm_f.weight": torch.tensor(1.0)}, r"norm_f.weight has shape \[\]; expected \[36\]"),
    ("mamba", {}, {"backbone.layers.0.mixer.conv1d.weight": lambda tensor: tensor.transpose(1, 2)},
     r"has shape \[72, 4, 1\]; expected \[72, 1, 4\] by config.json; .* MLX: give"),
])  # fmt: skip
def test_tensors_that_are_not_those_of_the_config_are_refused(
    family: str, config: dict[str, object], changes: dict[str, Any], sentence: str, tiny_checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Fault: quantised weights without their scales are taken for the weights themselves; a layer that config.json does
    not count, or a second embedding, is left out in silence, or only the first is named; config.json alone decides what
    is allocated; a tensor without dimensions breaks the reader; nothing says which one to take for MLX's."""
    single = tiny_checkpoint(family)
    made = {name: one(weights_of(single)[name]) if callable(one) else one for name, one in changes.items()}
    refused(with_config(with_weights(single, tmp_path / "m", made), tmp_path / "n", **config), sentence)


@pytest.mark.drawn(1)
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


# Headers


@table("has_config", [True, False])
@table("name, sentence", [
    ("jamba-q4_k.gguf", r"holds GGUF weights \(jamba-q4_k.gguf\), which are not read; give the checkpoint"),
    ("adapter_config.json", r"is an adapter \(LoRA, adapter_config.json\), not a model; give its base model as --mod"),
    ("adapter_model.safetensors", "is an adapter .* this folder as --adapter"),
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
    ({SINGLE: None}, "does not exist: .*m holds no weights; expected safetensors"),
    ({SINGLE: None, "pytorch_model.bin": b"x"}, "m holds pickle weights, .*; save them as safetensors; expected safet"),
    ({"adapter_config.json": b"{}"}, "has adapter_config.json beside the weights of a whole model.* as --adapter"),
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
    """Fault: an adapter beside weights is left out in silence; pickled weights are opened; a pointer is "not a whole
    safetensors file"; the state of a training is "pickle weights"; shards without their index, or safetensors of
    another name, are "no weights"."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content or b"")
        if content is None:
            (folder / name).unlink()
    refused(folder, sentence)


def place(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@table("header, length", [
    (b"{}", 1 << 60), (b"{}", 1 << 63), (b"{}", 3), (b"{}", 0), (b"", -1), (b"{", -1), (b"[1]", -1), (b"\xff", -1),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", -1),
    (b'{"__metadata__":{"a":1}}', -1),
    (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
     -1),
    *((entry, -1) for entry in (
        place("F32", [97, 36], 0, 1), place("F32", [97, 36], 0, 1 << 60), place("F32", [97, 36], 1 << 60, 1 << 61),
        place("F32", [97, 36], 16, 0), place("F32", [97, 36], 4, 13972), place("F32", [-97, 36], 0, 13968),
        place("F32", [1 << 62, 1 << 62], 0, 13968), place("F32", [1 << 62], 0, 0), place("F16", [97, 36], 0, 13968),
        {"dtype": "F32"}, 3, place("F32", [97, 36] + [1] * 7, 0, 13968), place("F32", [97, 36], 0, 13968) | {"more": 1},
        place("F32", [True], 0, 4), place("F32", "ab", 0, 4), place(4, [1], 0, 4), place("F32", [1], True, 5),
    )),
])  # fmt: skip
def test_a_broken_header_is_a_sentence(
    header: object, length: int, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a length that is allocated, a recursion, an error without the file's name; a tensor beyond the file, over
    another one, of negative or overflowing size is read."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    whole, data = header_of(folder / SINGLE)
    written = header if isinstance(header, bytes) else whole | {EMBEDDING: header}
    write_safetensors(folder / SINGLE, written, data, length)
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
    write_safetensors(folder / SINGLE, header | {name: place(dtype, [0], len(data), len(data))}, data)
    refused(folder, r"model.safetensors is not a whole safetensors file \(its header .*\); copy it again")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_infinite_numbers_become_nan_and_all_others_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault: an infinite number beside NaN, or one of each sign, stays; the extremes of the dtype are replaced."""
    most, plain = torch.finfo(dtype).max, torch.linspace(-1, 1, 150, dtype=dtype)
    changes = [{3: most, 90: -most}, {0: math.inf}, {149: -math.inf}, {7: math.inf, 8: -math.inf}]
    for sign, place in itertools.product((1, -1), (8, 24, 39, 41, 56, 72, 104)):
        changes.append({40: sign * math.inf, place: math.nan})
    tensors = {f"part.{number}": plain.clone() for number in range(len(changes))}
    for tensor, given in zip(tensors.values(), changes, strict=True):
        for place, value in given.items():
            tensor[place] = value
    save_file(tensors, tmp_path / SINGLE)
    with Checkpoint(tmp_path, torch.device("cpu")) as checkpoint:
        for name, tensor in tensors.items():
            expected = tensor.where(tensor.isfinite(), math.nan)
            assert torch.equal(checkpoint.take(name, (150,)).nan_to_num(5.0), expected.nan_to_num(5.0)), name


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


def test_tensors_are_read_ahead_by_their_bytes_in_the_order_of_use(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: the memory for reading ahead is full of what comes last; or the bytes of a tensor are those of another
    dtype, or of no number."""
    whole = tiny_checkpoint("mamba", num_hidden_layers=11)
    tensors, name = weights_of(whole), "backbone.layers.1.mixer.D"
    changed = {name: tensors[name].to(torch.bfloat16)}
    folder = with_weights(whole, tmp_path / "m", changed)
    with Checkpoint(folder, torch.device("cpu")) as checkpoint:
        sizes = checkpoint.sizes()
    assert sizes == {name: changed.get(name, tensor).nbytes for name, tensor in tensors.items()}
    layers = [int(name.split(".")[2]) if ".layers." in name else 99 for name in sizes]
    assert layers == sorted(layers) and set(layers) == {*range(11), 99}
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


def test_the_digest_is_of_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    """Catches a digest that depends on the order of asking or of threads, or that is another than before, so that no
    snapshot of an old store is found."""
    tensors = {
        f"layers.{i}.weight": torch.randn(i + 1, 3).to(dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 5)
    }
    save_file(tensors, tmp_path / SINGLE)
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(load_file(tmp_path / SINGLE).items()):
        content = tensor.view(torch.uint8).numpy().tobytes()
        whole.update(xxhash.xxh3_128_digest(content) + f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    with Checkpoint(tmp_path, torch.device("cpu")) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
        assert checkpoint.finish() == whole.digest()
