"""Targets around outputs: every output option given another name of something that must survive."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.fuzz.case import DEMO, Case, link_or_copy
from tests.fuzz.child import Fault
from tests.fuzz.inputs import RUN, SHAREGPT
from tests.fuzz.mutate import dump_json

READ = ("in.jsonl", "c.yaml", "salt.txt", "model/config.json", "model/tokenizer.json", "model/model.safetensors")
EARLIER = ("old.jsonl", "old.jsonl.run.json")
STORED = ("kept/index.sqlite", "kept/apcbatch-store")
OPTIONS = ("--model", "model", "--config", "c.yaml")
RUN_OPTIONS = (*OPTIONS, "--cache-salt", "@salt.txt", "--store", "kept")
OUTPUTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("run", *RUN_OPTIONS, "-o", "new.jsonl", "--summary"), (*READ, *EARLIER, *STORED, "precious.txt")),
    (("run", *RUN_OPTIONS, "-o", "new.jsonl", "--report"), (*READ, *EARLIER, *STORED, "precious.txt")),
    (("run", *RUN_OPTIONS, "-o"), (*READ, *EARLIER, *STORED, "precious.txt")),
    (("run", *RUN_OPTIONS, "--overwrite", "-o"), (*READ, *STORED)),
    (("run", *RUN_OPTIONS, "--overwrite", "-o", "old.jsonl", "--summary"), (*READ, *EARLIER, *STORED)),
    (("plan", *OPTIONS, "--json"), READ[:2] + READ[3:]),
    (("tune-block-size", *OPTIONS, "--json"), READ[:2] + READ[3:]),
    (("tune-block-size", *OPTIONS, "--write"), READ[:2] + READ[3:]),
    (("report", "old.jsonl", "--model", "model", "-o"), (*READ[3:], *EARLIER, "precious.txt")),
    (("report", "old.jsonl", "--model", "model", "--prompts", "in.jsonl", "--overwrite", "-o"), (*READ[3:], *EARLIER)),
)
SCHEMES = ("", "", "file://", "FILE://", "file:", "local://", "Local:", "file://localhost", "simplecache::file://")
ENDS = ("", "", "", "/", "//", "/.", "/..", "/./", "/x/..", "/../x")
CHAINS = ("filecache::local://", "simplecache://::FILE://", "blockcache::simplecache::file:")


def fuzz_outputs(case: Case) -> None:
    """An output that is, under another name, what the command reads or what belongs to something else: refused, and
    nothing changes. INPUT is an address too, at times."""
    draw = case.draw
    case.write("in.jsonl", dump_json(SHAREGPT) + b"\n")
    case.write("c.yaml", b"max_tokens: 1\n")
    case.write("salt.txt", b"a long secret\n")
    case.write("precious.txt", b"precious\n")
    shutil.copytree(case.stock / "kept", case.folder / "kept")
    (case.folder / "model").mkdir()
    for path in DEMO.iterdir():
        if path.is_file():
            link_or_copy(path, case.folder / "model" / path.name)
    for suffix in ("", ".run.json"):
        shutil.copyfile(case.stock / f"out.jsonl{suffix}", case.folder / f"old.jsonl{suffix}")
    before = _content(case.folder)
    for number in range(3):
        command, names = draw.choice(OUTPUTS)
        path = _another_name(case, draw.choice(names), number)
        input = () if command[0] == "report" else (draw.choice(SCHEMES) + str(case.folder / "in.jsonl"),)
        words = [*command, draw.choice((*SCHEMES, *CHAINS)) + path, *input]
        case.run(*words, *(RUN[3:] if command[0] == "run" else ()), expect=(2,))
        if (now := _content(case.folder)) != before:
            changed = sorted(str(one) for one in now.keys() | before.keys() if now.get(one) != before.get(one))
            raise Fault(f"changed: {', '.join(changed)}")


def _another_name(case: Case, name: str, number: int) -> str:
    """The absolute path of a file, of a link, a hard link or a chain of links to it, or one through `..`, the current
    folder of the process or a linked folder; with what may not stand behind the name of a file, at times."""
    path, end = case.folder / name, case.draw.choice(ENDS)
    kind = case.draw.randrange(6)
    if kind == 0:
        return f"{path}{end}"
    if kind == 1:
        return f"{path.parent}/../{path.parent.name}//{path.name}{end}"
    if kind == 2:
        return f"{case.draw.choice(('/proc/self/cwd', '/proc/self/root' + str(case.folder)))}/{name}{end}"
    other = case.folder / f"link-{number}"
    if kind == 3:
        other.symlink_to(case.draw.choice((case.folder, Path("."))))
        return f"{other}/{name}{end}"
    (os.symlink if kind == 4 or name.startswith("model/") else os.link)(path, other)
    if case.draw.randrange(2):
        chained = case.folder / f"link-{number}-{number}"
        chained.symlink_to(other.name + case.draw.choice(ENDS))
        return f"{chained}{end}"
    return f"{other}{end}"


def _content(folder: Path) -> dict[Path, bytes]:
    """The bytes of each file that the case has made, by its path."""
    own = ("stdout.txt", "stderr.txt")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("link-"))
    return {path: path.read_bytes() for path in files if path.name not in own}
