"""Targets around the checkpoint: its configuration, template, tokenizer, weights and shard index, what lies beside it,
long repeats, and the helper processes that work for it."""

from __future__ import annotations

import json
import os
import signal
import struct
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from apcbatch.data import helper
from tests.fuzz.case import DEMO, Case
from tests.fuzz.inputs import CONVERSATION, RUN, SHAREGPT
from tests.fuzz.mutate import dump_json, interesting, mutate_bytes, mutate_value
from tests.model.adapters import FILES, lora_of, save_adapter
from tests.model.quantized import FORMATS, encoded_tensors

INPUT = dump_json(SHAREGPT) + b"\n" + dump_json(CONVERSATION) + b"\n"
WEIGHTS = "model.safetensors"
ENDS = ("_scale", "_scale_inv", "_packed", "_shape", "_zero_point", "_g_idx", ".qweight", ".qzeros", ".input_scale", "")


def _answer(case: Case, changed: dict[str, bytes | None]) -> None:
    case.write("in.jsonl", INPUT)
    bounds = ("--max-tokens", "2", "--max-request-tokens", "20000")  # a tokenizer may make a million of a line
    outcome = case.run(*RUN, "in.jsonl", "--no-store", *bounds, "--model", case.model(changed))
    case.answered_lines(INPUT, outcome.code)


def fuzz_config(case: Case) -> None:
    """config.json and generation_config.json with other values, or other bytes."""
    draw = case.draw
    name = draw.choice(("config.json", "config.json", "config.json", "generation_config.json"))
    data = (DEMO / name).read_bytes()
    if draw.randrange(4):
        value = json.loads(data)
        for _ in range(draw.randint(1, 2)):
            value[draw.choice(list(value))] = interesting(draw)
        _answer(case, {name: dump_json(value)})
    else:
        _answer(case, {name: mutate_bytes(draw, data, draw.randint(1, 3))})


def fuzz_tokenizer(case: Case) -> None:
    """tokenizer.json and tokenizer_config.json with other values, or other bytes."""
    draw = case.draw
    name = draw.choice(("tokenizer.json", "tokenizer_config.json"))
    data = (DEMO / name).read_bytes()
    if draw.randrange(2):
        data = dump_json(mutate_value(draw, json.loads(data), draw.randint(1, 3)))
    else:
        data = mutate_bytes(draw, data, draw.randint(1, 3))
    _answer(case, {name: data})


HOSTILE = (
    "{{ 'a' * 10**12 }}", "{{ 'a' * 1000000000 }}", "{% for a in range(99999) %}{% for b in range(99999) %}x"
    "{% endfor %}{% endfor %}", "{{ lipsum(100000) }}", "{{ cycler() }}", "{{ range(10**9) | list | length }}",
    "{{ '%1000000000d' | format(1) }}", "{{ 'x' | center(10**10) }}", "{{ 9**9**9 }}",
    "{{ messages.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{% import 'x' as y %}", "{{ x.y.z }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ raise_exception('no') }}", "{{ [1] * 10**10 }}", "{{ messages | tojson(indent=10**9) }}", "{{ 1/0 }}",
    "{{ ''.join(['a'] * 10**10) }}", "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ {}[0] }}",
    "{{ strftime_now('%Y' * 10**8) }}", "{{ 'a' | replace('a', 'a' * 10**6) | replace('a', 'a' * 10**6) }}", "{% if %}",
    "{{ messages | sort(attribute='x.y') }}", "{{ (1, 2) | sum(start='x') }}", "{{ 10**10**6 }}", "{{ 'é' | urlize }}",
)  # fmt: skip


def fuzz_template(case: Case) -> None:
    """A chat template with hostile parts, deep nesting, or other bytes."""
    draw = case.draw
    name = "chat_template.jinja"
    text = (DEMO / name).read_text()
    kind = draw.randrange(4)
    if kind == 0:
        data = mutate_bytes(draw, text.encode(), draw.randint(1, 4))
    elif kind == 1:
        depth = draw.choice((20, 25, 90, 3000))
        inner, outer = draw.choice(
            (("{% for x in messages %}", "{% endfor %}"), ("{% if 1 %}", "{% endif %}"), ("{{ (", ") }}"))
        )
        data = (inner * depth + "x" + outer * depth).encode()
    else:
        place = draw.randrange(len(text))
        data = (
            text[:place] + draw.choice(HOSTILE) + text[place:] if kind == 2 else draw.choice(HOSTILE) + text
        ).encode()
    _answer(case, {name: data})


def _weights() -> tuple[dict[str, Any], bytes]:
    data = (DEMO / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def fuzz_weights(case: Case) -> None:
    """The weights' file: its header with other values, its lengths, its bytes, numbers that are not finite."""
    draw = case.draw
    header, body = _weights()
    kind = draw.randrange(4)
    if kind == 0:
        text = dump_json(mutate_value(draw, header, draw.randint(1, 2)))
        data = struct.pack("<Q", len(text)) + text + body
    elif kind == 1:
        data = mutate_bytes(draw, (DEMO / WEIGHTS).read_bytes()[: draw.choice((4, 8, 500, 50000))], 1)
    elif kind == 2:
        text = dump_json(header)
        length = draw.choice((0, 1, len(text) - 1, len(text) + 1, 1 << 40, (1 << 64) - 1))
        data = struct.pack("<Q", length) + text + body
    else:
        text = dump_json(header)
        numbers = bytearray(body)
        for _ in range(draw.choice((1, 1000))):
            place = 2 * draw.randrange(len(numbers) // 2)
            numbers[place : place + 2] = draw.choice((b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f"))
        data = struct.pack("<Q", len(text)) + text + bytes(numbers)
    _answer(case, {WEIGHTS: data})


def fuzz_quantised(case: Case) -> None:
    """A quantised folder: what it declares with other values; tensors that are gone, doubled, cut, of another type or
    with other bytes."""
    draw = case.draw
    form = FORMATS[draw.choice(sorted(FORMATS))]
    config, declared = json.loads((DEMO / "config.json").read_bytes()), form.config
    if draw.randrange(2):
        declared = mutate_value(draw, declared, draw.randint(1, 2))
    plain = load((DEMO / WEIGHTS).read_bytes())
    tensors, _ = encoded_tensors(plain, form, np.random.default_rng(draw.randrange(1 << 31)))
    around = sorted(tensors.keys() - plain.keys()) or sorted(tensors)
    for _ in range(draw.randint(0, 2)):
        name = draw.choice((draw.choice(around), draw.choice(sorted(tensors))))
        tensor, kind = tensors[name], draw.randrange(5)
        if kind == 0:
            del tensors[name]
            around = [one for one in around if one != name] or sorted(tensors)
        elif kind == 1:
            module = name.removesuffix(".weight")
            tensors[draw.choice((module, name)) + draw.choice(ENDS)] = tensor.clone()
        elif kind == 2 and tensor.dim():
            tensors[name] = tensor[draw.choice((1, -1)) :].clone()
        elif kind == 3:
            tensors[name] = tensor.to(draw.choice((torch.int32, torch.int8, torch.float16, torch.float32, torch.int64)))
        else:
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            raw[torch.tensor([draw.randrange(len(raw)) for _ in range(9)])] = draw.choice((0, 127, 128, 255))
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    _answer(case, {WEIGHTS: data, "config.json": dump_json(config | {"quantization_config": declared})})


def fuzz_shards(case: Case) -> None:
    """A checkpoint in shards whose index says something else."""
    draw = case.draw
    header, _ = _weights()
    names = [name for name in header if name != "__metadata__"]
    index: dict[str, Any] = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "part-1.safetensors"),
    }
    if draw.randrange(3):
        for _ in range(draw.randint(1, 3)):
            index["weight_map"][draw.choice(names)] = draw.choice(
                (interesting(draw), "../part-1.safetensors", "nowhere")
            )
        if not draw.randrange(3):
            index = mutate_value(draw, index, 1)
        data = dump_json(index)
    else:
        data = mutate_bytes(draw, dump_json(index), draw.randint(1, 3))
    part = (DEMO / WEIGHTS).read_bytes()
    _answer(case, {WEIGHTS: None, "part-1.safetensors": part, f"{WEIGHTS}.index.json": data})


def _replaces(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def fuzz_parts(case: Case) -> None:
    """A tokenizer with a normalizer, pattern or decoder that backtracks or does not fit, so that the library panics."""
    draw = case.draw
    document = json.loads((DEMO / "tokenizer.json").read_bytes())
    letter = draw.choice(("a", " ", "e", "\n"))
    patterns = ("(a+)+$", "(.*)*x", r"(\s|\S)*?$", "(?=(a+))a*b", ".{1000}{1000}", "(", "")
    pattern = draw.choice(({"String": letter}, {"Regex": draw.choice(patterns)}))
    grow = [_replaces(pattern, letter * draw.choice((0, 1, 2)))] * draw.choice((1, 2))
    split = {"type": "Split", "pattern": pattern, "behavior": draw.choice(("Isolated", "Removed")), "invert": False}
    kind = draw.randrange(3)
    if kind == 0:
        document["normalizer"] = {"type": "Sequence", "normalizers": grow}
    elif kind == 1:
        document["pre_tokenizer"]["pretokenizers"][0] = split
    else:
        document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], {"type": "Fuse"}, *grow]}
    _answer(case, {"tokenizer.json": dump_json(document)})


def fuzz_neighbours(case: Case) -> None:
    """Named pipes, folders, devices, links that lead nowhere and huge files beside the checkpoint, or in its place."""
    draw = case.draw
    model = case.folder / case.model({})
    needed = [path.name for path in model.iterdir() if path.suffix in (".json", ".jinja")]
    stems = ("notes", "vocab", "merges", "spiece", "tokenizer", "special_tokens_map", "words\udcff", "ü")
    for _ in range(draw.randint(1, 5)):
        name = draw.choice(stems) + draw.choice((".json", ".txt", ".jinja", ".model"))
        if not draw.randrange(4):
            name = draw.choice(needed)
        path = model / draw.choice((name, name, name, f"additional_chat_templates/{name}"))
        path.parent.mkdir(exist_ok=True)
        if path.is_symlink() or path.is_file():
            path.unlink()
        kind = draw.randrange(5)
        if path.exists():
            continue
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 4:
            with open(path, "wb") as file:
                file.truncate(3 << 30)
        else:
            path.symlink_to("nowhere" if kind == 2 else "/dev/zero")
    case.write("in.jsonl", INPUT)
    outcome = case.run(*RUN, "in.jsonl", "--no-store", "--max-tokens", "2", "--model", "model")
    case.answered_lines(INPUT, outcome.code)


def fuzz_repeats(case: Case) -> None:
    """A text of one character, or a few, by the hundred thousand or the million."""
    draw = case.draw
    count = draw.choice((1000, 100_000, 400_000, 1_500_000, 4_194_304, 10_001_000))
    letters = draw.choice((" ", "a", "\n", " \n", "!?", "1", "é", "🦔", "a\t", "<|", "\u0301", "ﷺ", "\x00"))
    text = (letters * (count // len(letters) + 1))[:count] + draw.choice(("", "x", " x"))
    line = {"id": "long", "messages": [{"role": "user", "content": text}]}
    data = INPUT + json.dumps(line, ensure_ascii=False).encode() + b"\n"
    case.write("in.jsonl", data)
    run = (*RUN, "in.jsonl", "--no-store", "--max-tokens", "2", "--max-request-tokens", "2000")
    case.answered_lines(data, case.run(*run, expect=(0, 3)).code)


def fuzz_helpers(case: Case) -> None:
    """Helper processes that are killed at some of their requests, for templates and grammars."""
    draw = case.draw
    lines = [CONVERSATION | {"id": str(number), "guided_regex": draw.choice(("a+", "b"))} for number in range(6)]
    data = b"".join(dump_json(line) + b"\n" for line in lines)
    case.write("in.jsonl", data)
    share, send = draw.choice((0.05, 0.3, 1.0)), helper._Child.send
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS)

    def attacked(child: helper._Child, request: bytes, wall_seconds: float) -> None:
        if draw.random() < share:
            os.kill(child._process.pid, draw.choice(signals))
        send(child, request, wall_seconds)

    helper._Child.send = attacked  # type: ignore[method-assign]
    try:
        run = (*RUN, "in.jsonl", "--no-store", "--max-tokens", "2")
        first = case.run(*run, expect=(0, 1, 3))
    finally:
        helper._Child.send = send  # type: ignore[method-assign]
    case.answered_lines(data, first.code)
    case.run(*run, *(("--resume", "--retry-errors") if (case.folder / "out.jsonl").exists() else ()), expect=(0,))
    case.answered_lines(data, 0)


def fuzz_adapter(case: Case) -> None:
    """An adapter with other values in its config, other names or shapes of its tensors, or other bytes."""
    draw, weights = case.draw, load((DEMO / WEIGHTS).read_bytes())
    names = [name for name in weights if name.endswith("_proj.weight")]
    tensors = lora_of(weights, draw.sample(names, draw.randint(1, len(names))), draw.randrange(9))
    kind = draw.choice(("config", "config", "tensors", "bytes", "as it is"))
    for name in draw.sample(list(tensors), draw.randint(1, 2)) if kind == "tensors" else ():
        tensor = tensors.pop(name)
        changed = tensor[:0], tensor[0], tensor.t(), tensor.half(), tensor.int(), tensor / 0
        if draw.randrange(2):
            name = mutate_bytes(draw, name.encode(), 1).decode(errors="replace")
        tensors[name] = draw.choice((tensor, *changed))
    folder = save_adapter(case.folder / "adapter", tensors)
    if kind == "config":
        value = json.loads((folder / FILES[0]).read_bytes())
        for _ in range(draw.randint(1, 3)):
            key = draw.choice((*value, "target_parameters", "layers_to_transform", "exclude_modules", "use_dora"))
            value[key] = draw.choice((interesting(draw), [interesting(draw)], "(.*)*x|" * draw.randint(1, 40)))
        (folder / FILES[0]).write_bytes(dump_json(value))
    elif kind == "bytes":
        path = folder / draw.choice(FILES)
        path.write_bytes(mutate_bytes(draw, path.read_bytes(), draw.randint(1, 3)))
    case.write("in.jsonl", INPUT)
    command = draw.choice((("run", "--no-store", "--max-tokens", "2", "-o", "out.jsonl"), ("plan",), ("show",)))
    code = case.run(*command, "in.jsonl", "--adapter", "adapter").code
    case.answered_lines(INPUT, code if command[0] == "run" else 2)
