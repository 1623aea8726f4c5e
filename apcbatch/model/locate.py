"""Find a model: a bundled one, a local folder, or a hub id that is already in the cache.

Nothing is ever downloaded. A folder that holds something else, such as GGUF weights, an adapter or pointers of git-LFS,
is refused with an error that says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from apcbatch.address import HUB_PREFIX
from apcbatch.display import visible
from apcbatch.errors import ModelError
from apcbatch.regular_files import read_regular_file

_LFS_HEAD = b"version https://git-lfs"  # of a file that git has in place of a large one
_LFS_BYTES = 1 << 10
_READ = ("model*.safetensors", "*.json", "*.jinja", "*.model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_STATE_OF_TRAINING = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")
_PACKAGE = Path(__file__).resolve().parent.parent
ADAPTER = "adapter_config.json"
DEMO_DIR = _PACKAGE / "demo"
BUNDLED = {"demo": DEMO_DIR, "demo-jamba": _PACKAGE / "demo_jamba"}
NOTE_OF_BUNDLED = (
    "the bundled model `{}` is tiny and trained on generated conversations: its answers have the right form, not "
    "always the right content. Name a real model with --model DIR or --model ORG/NAME"
)


def locate_model(name: str) -> Path:
    """Return the folder of a model given as `demo` or `demo-jamba`, a local path, or a Hugging Face id (`org/name` or
    `hf:org/name`) in the local cache."""
    if name in BUNDLED:
        return BUNDLED[name]
    name = name.removeprefix(HUB_PREFIX)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _checked(Path(path))
    if os.path.isfile(path):
        what = what_it_is(Path(path).parent, [Path(path)])
        raise ModelError(f"model {name!r} is a file; expected a model folder" + (f": {what}" if what else ""))
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        names = ", ".join(map(repr, BUNDLED))
        raise ModelError(f"model {name!r} is not a folder; expected {names}, a model folder or a hub id (org/name)")
    return _cached(name)


def what_it_is(folder: Path, files: Iterable[Path] | None = None) -> str | None:
    """Return what a folder without readable weights holds, such as an adapter, and what to give instead; None if it is
    not recognised. files: those of its files to inspect; None: all."""
    names = sorted(path.name for path in files or folder.glob("*"))
    gguf = next((name for name in names if name.lower().endswith(".gguf")), None)
    if gguf is not None:
        return f"{folder} holds GGUF weights ({gguf}), which are not read; give the checkpoint they were made from"
    if ADAPTER in names or "adapter_model.safetensors" in names:
        return (
            f"{folder} is an adapter (LoRA, {ADAPTER}), not a model; give its base model as --model, and this folder "
            "as --adapter"
        )
    if newest := max((name for name in names if _step(name) and (folder / name).is_dir()), key=_step, default=None):
        return f"{folder} holds the checkpoints of a training and no weights; give the newest, {folder / newest}"
    if "snapshots" in names and "refs" in names:
        name = folder.name.removeprefix("models--").replace("--", "/")
        return f"{folder} is a folder of the Hugging Face cache; give {visible(name)}, or a folder in its snapshots/"
    if any(name.endswith(_PICKLES) and name not in _STATE_OF_TRAINING for name in names):
        return f"{folder} holds pickle weights, which are never opened; save them as safetensors"
    return None


def _checked(folder: Path) -> Path:
    """Return the folder. Raises ModelError if it is recognised as something other than a model."""
    what = _pointers(folder)
    if what is None and not os.path.exists(folder / "config.json"):
        what = what_it_is(folder)
    elif what is None and (folder / ADAPTER).exists() and any(folder.glob("model*.safetensors")):
        what = (
            f"{folder} has {ADAPTER} beside the weights of a whole model, so that it is open which of them are meant; "
            "move the adapter's files to another folder, and give that as --adapter to run the model with it"
        )
    if what is not None:
        raise ModelError(what)
    return folder


def _pointers(folder: Path) -> str | None:
    """Say which files that a run reads are pointers of git-LFS in place of the files; None if none is."""
    found = sorted(path.name for pattern in _READ for path in folder.glob(pattern) if _is_pointer(path))
    if not found:
        return None
    what = f"{found[0]} and {len(found) - 1} more are pointers" if found[1:] else f"{found[0]} is a pointer"
    return f"{folder}: {what} of git-LFS, without the content; run `git lfs pull` there, or download the model again"


def _is_pointer(path: Path) -> bool:
    try:
        is_small = path.stat().st_size < _LFS_BYTES
        return is_small and read_regular_file(path, _LFS_BYTES).startswith(_LFS_HEAD)
    except OSError:
        return False


def _step(name: str) -> int:
    """Return the step in the name of a trainer's checkpoint, `checkpoint-500`; 0 for any other name."""
    match = re.fullmatch(r"checkpoint-([0-9]{1,18})", name)
    return int(match[1]) if match else 0


def note_of(model: str) -> str | None:
    """Return a warning that users of this bundled model must see; None for any other model."""
    return NOTE_OF_BUNDLED.format(model) if model in BUNDLED else None


def name_of(model: str) -> str:
    """Return a model's name without a path: a hub id as it was given; of a folder or any other name, the last
    component."""
    is_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).is_dir()
    return model if is_hub_id else Path(os.path.abspath(model)).name


def _cached(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _checked(Path(snapshot_download(hub_id, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise ModelError(
            f"model {hub_id!r} is neither a folder nor in the Hugging Face cache; "
            f"download it first (hf download {hub_id}) or give a folder"
        ) from None
