"""OUT.run.json by itself: what is read as one, what may be replaced, and the sentence for each reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from apcbatch.config import Config
from apcbatch.data.input.inputs import Inputs
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk
from apcbatch.job.runfile import RunFile, input_identity, is_run_file, read_run_file

FACTS: dict[str, Any] = {"version": "1", "config": {}, "input": {}}


def run_file_of(folder: Path, **changes: Any) -> RunFile:
    """The run file of folder/out.jsonl, for an input of one name and size."""
    input = {"name": "in", "size_bytes": 3, "xxh3_of_ends": "0"}
    return RunFile(folder / "out.jsonl", Config(**changes), input, "m", Disk())


def test_what_is_no_run_file_is_called_what_it_is(tmp_path: Path) -> None:
    """Fault: a file of somebody else's is compared as a run file, or the error names another fault."""
    for content, reason in [
        (orjson.dumps(FACTS), ""),
        (None, "is missing"),
        ("folder", "is not a file"),
        (b"{", "is not a run file of this program (unexpected"),
        (b"", "is not a run file of this program ("),
        (b"[]", "is not a run file"),
        (b"{}", "is not a run file"),
        (orjson.dumps({"config": {}, "input": {}}), "is not a run file"),
        (orjson.dumps(FACTS | {"config": []}), "is not a run file"),
        (orjson.dumps(FACTS | {"input": None}), "is not a run file"),
    ]:
        path = tmp_path / "out.jsonl.run.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
            assert is_run_file(content) is not bool(reason)
        elif content == "folder":
            path.mkdir()
        else:
            path.unlink()
        facts, found = read_run_file(path)
        assert found.startswith(reason) and bool(found) == bool(reason) and facts == (None if reason else FACTS)
        if reason:
            way = "or choose another -o, or " + ("--overwrite" if content is None else "move it away and --overwrite")
            with pytest.raises(UsageError, match=f"{path} .*put that run's file there, {way}$"):
                run_file_of(tmp_path).check()
        if content == "folder":
            path.rmdir()


def test_only_its_own_run_file_at_an_address_is_replaced(tmp_path: Path) -> None:
    """Fault: --resume uploads over another run's OUT, or is refused where the upload before broke off."""
    for there, is_alone, refused in [
        (None, True, None),
        (None, False, "is missing"),
        ("same", True, None),
        ("same", False, None),
        ("other", True, "is of a different run"),
        ("other", False, "is of a different run"),
        ("none of ours", True, "is of a different run"),
    ]:
        own = run_file_of(tmp_path)
        run_file_of(tmp_path, seed=5 if there == "other" else 0).write()
        data = {None: None, "none of ours": b"{}"}.get(there, own.path.read_bytes())
        try:
            own.check_uploaded("s3://b/o", data, is_alone)
            assert refused is None
        except UsageError as error:
            assert refused is not None and f"s3://b/o is not this run's: s3://b/o.run.json {refused}; give" in str(
                error
            )


def test_the_input_is_known_by_its_size_and_name(tmp_path: Path) -> None:
    """Fault: the run file says another size, or another name than the file has or was given."""
    one, two = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    Path(one).write_bytes(b"abc")
    Path(two).write_bytes(b"de")
    alone = input_identity(Inputs((one,), (one,)))
    assert (alone["name"], alone["size_bytes"]) == (one, 3)
    both = input_identity(Inputs(("a.jsonl", "b.jsonl"), (one, two)))
    assert (both["name"], both["size_bytes"]) == ("a.jsonl, b.jsonl", 5)


def test_names_alone_are_told_apart() -> None:
    """Fault: of addresses whose list is cut in the run file, another one behind the cut is the same input."""
    names = tuple(f"memory://bucket/{number:0100}" for number in range(60))
    whole, fewer = (input_identity(Inputs(some, some)) for some in (names, (*names[:-1], "memory://bucket/other")))
    assert whole["name"] == fewer["name"] and len(whole["name"]) == 4096 and whole["size_bytes"] is None
    assert whole["xxh3_of_ends"] != fewer["xxh3_of_ends"] and whole["xxh3_of_ends"] is not None
    assert input_identity(Inputs(names[:1], names[:1]))["xxh3_of_ends"] is None


def test_another_version_is_told_from_this_one(tmp_path: Path) -> None:
    """Fault: the answers of another version are trusted by their lines alone, or this one's are compared again."""
    file = run_file_of(tmp_path)
    file.write()
    assert file.check() is True and file.same_draw_rule
    facts = orjson.loads(file.path.read_bytes())
    for version in ("0", "~"):
        file.path.write_bytes(orjson.dumps(facts | {"version": version, "draws": version}))
        other = run_file_of(tmp_path)
        assert other.check() is False and not other.same_draw_rule
        other.keep_earlier("draws")
        other.write()
        assert orjson.loads(file.path.read_bytes())["draws"] == version


def test_what_differs_is_said_within_bounds(tmp_path: Path) -> None:
    """Fault: a damaged run file fills the terminal with megabytes of one value."""
    file = run_file_of(tmp_path)
    file.write()
    facts = orjson.loads(file.path.read_bytes())
    file.path.write_bytes(orjson.dumps(facts | {"model_files": "x" * 99_999, "system_prompt": [[]] * 99_999}))
    with pytest.raises(UsageError, match=r"then \[\[\], .*\.\.\., now None\n") as refused:
        file.check()
    assert len(str(refused.value)) < 1000 and "xxx..., now 'm'" in str(refused.value)
