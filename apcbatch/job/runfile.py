"""Read and write OUT.run.json, the configuration that made the lines of OUT, so that no different run adds to them.

Invariant: everything besides INPUT that can change an answer is compared; each line of OUT has digests of what it was
made from. Order, batch sizes, block size, policy and store are not compared, because answers are the same bit for bit
with any of them; they may change when a run resumes, as INPUT may. The file also has an entry for each process that
worked on OUT (processes.py).
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import xxhash

from apcbatch.address import shown_address
from apcbatch.config import OPTIONS, Config
from apcbatch.data.input.files import reason
from apcbatch.data.input.inputs import RUN_FILE_SUFFIX, Inputs
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk, write_file
from apcbatch.job.input_changes import MOST_LINES, Stretch
from apcbatch.job.processes import Process, bounded, is_seconds, plain
from apcbatch.option_values import brief, shown
from apcbatch.regular_files import identity
from apcbatch.resolution import with_defaults
from apcbatch.sampling import SETTINGS
from apcbatch.version import VERSION

CHANGES_ANSWERS = (
    "dtype",
    "format",
    "messages_column",
    "prompt_column",
    "tools_column",
    "id_column",
    "ignore_columns",
    "strict_model",
    "shard",
    "turns",
    "score",
    "max_request_tokens",
    "logprobs_mode",
    "max_turns",
    "max_episode_tokens",
    "samples",
    "history",
    *(setting.option_name for setting in SETTINGS.values() if setting.option_name),
    "template_kwargs",
    "tool_parser",
    "reasoning_parser",
)
# Options that --resume takes from the run file where they are not given; all of them can change an answer.
RESUMED = ("model", "adapter", "exact", "system_prompt", "chat_template", "template_date", *CHANGES_ANSWERS)
# Names the rule by which this version seeds random draws: the line's own seed, or --seed and the line's id or content.
# Older run files have no `draws`: those runs seeded draws by the request's number.
DRAWS = "seed, id or content"
END_BYTES = 1 << 20  # read at each end of the input; divided among several files
LEAST_END_BYTES = 1 << 12
MOST_CHARACTERS = 1 << 12
MAX_BYTES = 1 << 23
MOST_SHOWN = 200  # characters of a value in an error message
MOST_INPUTS = 100  # whose identities the run file keeps
MOST_MERGED = 1 << 31  # requests; `merge` takes two bytes for each
MISSING = "is missing"
NOT_ONE = "is not a run file of this program"


def input_identity(inputs: Inputs) -> dict[str, Any]:
    """Return the identity of INPUT. For files, it is their total size and one xxh3-128 over the first and last bytes of
    each file: END_BYTES at each end of a single file, fewer per file if there are several. For other inputs it is the
    names alone."""
    if not inputs.are_files:
        names, of_names = ", ".join(map(shown_address, inputs.files)), None
        if len(inputs.files) > 1:  # whose list may be cut
            of_names = xxhash.xxh3_128_hexdigest("\0".join(inputs.files).encode("utf-8", "surrogateescape"))
        return {"name": names[:MOST_CHARACTERS], "size_bytes": None, "xxh3_of_ends": of_names}
    end_bytes = max(LEAST_END_BYTES, END_BYTES // len(inputs.files))
    size, digest = 0, xxhash.xxh3_128()
    for name in inputs.files:
        with open(name, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if len(inputs.files) > 1:
                digest.update(b"%d\0" % length)
            digest.update(file.read(end_bytes))
            file.seek(max(0, length - end_bytes))
            digest.update(file.read(end_bytes))
        size += length
    name = str(Path(inputs.files[0]).resolve()) if len(inputs.files) == 1 else inputs.shown
    return {"name": name, "size_bytes": size, "xxh3_of_ends": digest.hexdigest()}


def _digest_of(text: str | None) -> str | None:
    return None if text is None else xxhash.xxh3_128_hexdigest(text.encode())


class RunFile:
    """Run file beside one OUT."""

    def __init__(
        self,
        output: Path,
        config: Config,
        input: dict[str, Any],
        model_files: str,
        disk: Disk,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        adapter: str | None = None,
        input_digest: str | None = None,
        tools: str | None = None,
    ) -> None:
        self.output, self._disk = output, disk
        self.path = Path(run_file_path(str(output)))
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "input": input,
            "input_digest": input_digest,
            "earlier_inputs": [],
            "moved": [],
            "model_fingerprint": None,
            "model_files": model_files,
            "adapter": adapter,
            "tools": tools,
            "draws": DRAWS,
            "template_clock": config.template_clock,
            "system_prompt": _digest_of(system_prompt),
            "chat_template": _digest_of(chat_template),
            "config": config.values(),
            "origins": plain(dict(config.origins)),
            "shard_requests": None,
            "begin": None,
            "dropped_processes": 0,
            "processes": [],
        }
        self._earlier: Mapping[str, Any] = {}  # facts that `check` has read
        self._earlier_processes: list[Any] = []
        self._num_dropped = 0  # entries of earlier processes that the file has no more
        self._own: tuple[int, ...] | None = None  # identity of the file as it was written

    def set(self, **facts: Any) -> None:
        """Set facts that the run finds out, by key of the file. model_fingerprint: of the weights. moved: stretches of
        moved records; None if there are too many to list. shard_requests: requests of INPUT, and of this shard."""
        self._facts |= facts

    def keep_earlier(self, name: str) -> None:
        """Set a fact to its value in the earlier run, such as the model's fingerprint if no weights are read."""
        self._facts[name] = self._earlier.get(name)

    @property
    def same_draw_rule(self) -> bool:
        """Whether the run that `check` accepted seeded random draws by the same rule."""
        return self._earlier.get("draws") == DRAWS

    @property
    def has_other_tools(self) -> bool:
        """Whether the module of --tools has another digest than in the run that `check` accepted."""
        return self._earlier.get("tools") not in (None, self._facts["tools"])

    @property
    def has_other_input(self) -> bool:
        """Whether INPUT has other bytes than that of the run that `check` accepted. False for a stream or an
        address."""
        return self._facts["input"]["size_bytes"] is not None and _identity(self._earlier) != _identity(self._facts)

    @property
    def moved(self) -> list[Stretch]:
        """Stretches of records whose line in INPUT is not the one in the record, as in MovedLines; of the run that
        `check` accepted."""
        value = self._earlier.get("moved")
        stretches = value if isinstance(value, list) else []
        are_whole = all(
            isinstance(one, list)
            and len(one) == 3
            and all(type(part) is int and abs(part) < MOST_LINES for part in one)
            for one in stretches
        )
        return [(first, last, distance) for first, last, distance in stretches] if are_whole else []

    def is_shard_answered(self, num_answers: int) -> bool:
        """Return whether the run that `check` accepted answered all requests of its shard, and OUT has that many."""
        counts = shard_requests(self._earlier)
        return counts is not None and counts[1] == num_answers

    def keep_processes(self) -> None:
        """Keep the entries of earlier processes in the file, as they are."""
        earlier = read_run_file(self.path)[0] or {}
        entries, dropped, begin = (earlier.get(name) for name in ("processes", "dropped_processes", "begin"))
        self._earlier_processes = entries if isinstance(entries, list) else []
        self._num_dropped = dropped if type(dropped) is int and 0 < dropped < MOST_LINES else 0
        self._facts |= {"begin": begin if is_seconds(begin) else None, "processes": self._earlier_processes}
        self._facts["dropped_processes"] = self._num_dropped

    def record(self, process: Process) -> None:
        """Write this process's entry, in place of the one that it had. Raises OSError, also if another program has put
        a file there."""
        if self._facts["begin"] is None:
            self._facts["begin"] = process.begin
        if identity(self.path) != self._own:
            raise FileExistsError(errno.EEXIST, "another program has put a file there while this run went on")
        entries = [*self._earlier_processes, process]
        kept = bounded(entries)
        self._facts |= {"dropped_processes": self._num_dropped + len(entries) - len(kept), "processes": kept}
        self._replace()

    def seconds_before(self, process: Process) -> float:
        """Return the seconds from the begin of OUT's first process to the begin of this one. `record` was called."""
        begin: float = self._facts["begin"]
        return max(0.0, process.begin - begin)

    def check_uploaded(self, shown: str, data: bytes | None, is_alone: bool) -> None:
        """Refuse to replace an OUT of a different run at OUT's address. shown: the address, for the error. data:
        content of the run file at the address; None if there is no run file. is_alone: there is no OUT at the
        address."""
        facts = None if data is None else _facts_in(data)
        if facts is None and data is None and is_alone:
            return
        local = read_run_file(self.path)[0] or self._facts
        known = [_identity(self._facts), _identity(local), *_earlier_inputs(local)]
        if facts is None or _identity(facts) not in known or any(differences(facts, self._facts)):
            raise UsageError(
                f"what lies at {shown} is not this run's: {shown}{RUN_FILE_SUFFIX} "
                f"{MISSING if data is None else 'is of a different run'}; give another -o, or --overwrite"
            )

    def check(self) -> bool:
        """Refuse to continue a different run; UsageError has a line for each field that differs.

        Return whether the earlier run was of this same version.
        """
        self._earlier = earlier = self.earlier()
        inputs = _earlier_inputs(earlier)
        if _identity(earlier) not in (_identity(self._facts), *inputs):
            inputs.append(_identity(earlier))
        self._facts["earlier_inputs"] = inputs[-MOST_INPUTS:]
        found = list(differences(earlier, self._facts))
        if found:
            width = max(len(field) for field, _, _ in found)
            rows = [f"  {field:<{width}}  then {cut(then)}, now {cut(now)}" for field, then, now in found]
            ways = "give the earlier values again, or another -o, or --overwrite"
            if any(field == "input" for field, _, _ in found):
                ways += "; where INPUT has grown, merge the shards of the earlier one, and --resume the merged OUT"
            raise UsageError(
                f"output {self.output} is of a different run; --resume would mix two kinds of answers:\n"
                + "\n".join(rows)
                + f"\n{ways}"
            )
        return bool(earlier["version"] == VERSION)

    def earlier(self) -> Mapping[str, Any]:
        """Return the facts of the run that wrote OUT; UsageError if there is no run file."""
        earlier, fault = read_run_file(self.path)
        if earlier is None:
            ways = "--overwrite" if fault == MISSING else "move it away and --overwrite"
            raise UsageError(
                f"{self.path} {fault}, so nothing says which run wrote {self.output}; "
                f"put that run's file there, or choose another -o, or {ways}"
            )
        return earlier

    def write(self) -> None:
        """Write the file atomically; UsageError if it cannot be written."""
        try:
            self._replace()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}; choose another -o") from None

    def _replace(self) -> None:
        write_file(str(self.path), [as_json(self._facts)], self._disk)
        self._own = identity(self.path)


def read_run_file(path: str | Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return (facts, empty text) of a run file; (None, reason) if it cannot be read or is another file."""
    try:
        if not os.path.isfile(path):
            return None, "is not a file" if os.path.lexists(path) else MISSING
        with open(path, "rb") as file:
            facts = _facts_in(file.read(MAX_BYTES))
    except OSError as error:
        return None, f"cannot be read ({reason(error)})"
    except orjson.JSONDecodeError as error:
        return None, f"{NOT_ONE} ({error})"
    return facts, "" if facts else NOT_ONE


def with_clock_of(config: Config, path: str) -> Config:
    """Return the configuration with the start time of the run whose run file is at `path`, so that the chat template
    reads the same time; unchanged without that file or time. UsageError for a time that cannot be read."""
    facts, _ = read_run_file(path)
    clock = None if facts is None else facts.get("template_clock")
    if clock is None:
        return config
    try:
        datetime.fromisoformat(clock)
    except (TypeError, ValueError):
        raise UsageError(f"{path}: template_clock is {brief(clock)}; expected a time in ISO 8601") from None
    return dataclasses.replace(config, begin=clock)


def with_earlier_options(config: Config, output: str) -> Config:
    """Return the configuration that continues OUT: options of RESUMED that are not given, and --limit of a shard, have
    the values of OUT's run file, if there is one. output: path of OUT on this machine. Raises UsageError for a bad
    value in the file."""
    path = run_file_path(output)
    earlier = (read_run_file(path)[0] or {}).get("config", {})
    names = (*RESUMED, "limit") if earlier.get("shard") is not None else RESUMED
    values = {name: earlier[name] for name in names if name in earlier}
    try:
        return with_defaults(config, values, path, lambda name: f"{os.path.basename(path)}: {name}")
    except ValueError as error:
        raise UsageError(f"{error}; put that run's file there, or give --overwrite") from None


def is_run_file(data: bytes) -> bool:
    """Return whether these are the bytes of a run file."""
    try:
        return _facts_in(data) is not None
    except orjson.JSONDecodeError:
        return False


def _facts_in(data: bytes) -> Mapping[str, Any] | None:
    facts = orjson.loads(data)
    parts = ("config", "input") if isinstance(facts, dict) else ()
    known = parts and all(isinstance(facts.get(part), dict) for part in parts)
    return facts if known and "version" in facts else None


def run_file_path(output: str) -> str:
    """Return the path of an OUT's run file: beside the file that OUT leads to, with each link followed."""
    return os.path.realpath(os.path.realpath(output) + RUN_FILE_SUFFIX)


def as_json(facts: dict[str, Any]) -> bytes:
    """Return the facts as JSON. Bytes of a path that are not UTF-8 are escaped."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    name = os.fsencode(str(facts["input"].get("name"))).decode("utf-8", "backslashreplace")
    return orjson.dumps(facts | {"input": facts["input"] | {"name": name}}, option=option)


def cut(value: Any) -> str:
    """Return a value of the run file as text of at most MOST_SHOWN characters."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _identity(facts: Mapping[str, Any]) -> list[Any]:
    """Return size and digest of a run file's input; for a stream or an address also its name."""
    found = facts["input"]
    size = found.get("size_bytes")
    return [size, found.get("xxh3_of_ends"), *([found.get("name")] if size is None else [])]


def _earlier_inputs(facts: Mapping[str, Any]) -> list[Any]:
    """Return the identities of the inputs that OUT had before the run file's own."""
    inputs = facts.get("earlier_inputs")
    return list(inputs) if isinstance(inputs, list) else []


def shard_requests(facts: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of requests that INPUT and a shard have; None where not all of the shard are answered."""
    match facts.get("shard_requests"):
        case [int(in_input), int(in_shard)] if 0 <= in_shard <= in_input <= MOST_MERGED:
            return in_input, in_shard
    return None


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, then, now) for each field that changes answers and differs; of a shard, also for those that change
    which requests it has. An option that the earlier version did not have counts as its default."""
    earlier, pairs = then["config"], list[tuple[str, Any, Any]]()
    for name in CHANGES_ANSWERS:
        default = shown(OPTIONS[name], getattr(Config, name))
        pairs.append((name, earlier.get(name, default), now["config"].get(name, default)))
    pairs += [(name, then.get(name), now.get(name)) for name in ("system_prompt", "chat_template", "adapter")]
    if now["config"].get("shard") is not None:
        pairs += [(name, earlier.get(name), now["config"].get(name)) for name in ("limit", "template_date")]
        one, other = ([*_identity(facts), facts.get("input_digest")] for facts in (then, now))
        if one != other:
            pairs.append(("input", then["input"] | {"digest": one[-1]}, now["input"] | {"digest": other[-1]}))
        pairs.append(("version", then["version"], now["version"]))
    clock = now.get("template_clock")
    pairs.append(("template_clock", then.get("template_clock", clock), clock))  # earlier versions did not keep it
    files = then.get("model_files"), now.get("model_files")
    if files[0] != files[1]:
        pairs += [("model", earlier.get("model"), now["config"].get("model")), ("model_files", *files)]
    fingerprints = then.get("model_fingerprint"), now.get("model_fingerprint")
    if fingerprints[1] is not None:
        pairs.append(("model_fingerprint", *fingerprints))
        if fingerprints[0] != fingerprints[1]:  # on a GPU, another --exact changes the fingerprint
            pairs.append(("exact", earlier.get("exact"), now["config"].get("exact")))
    yield from (pair for pair in pairs if pair[1] != pair[2])
