"""Find known answers to the requests of a run, for drafts: the recorded ones, and those of --draft-from.

Invariant: known answers never change an answer or cause an error record; one that cannot be used is left out.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from apcbatch.config import Config
from apcbatch.data.chat.known_answers import MOST_KNOWN_TOKENS, KnownAnswers
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.data.input.files import BROKEN, COMPRESSED, Stream, reason
from apcbatch.data.input.messages import check_messages
from apcbatch.data.model_files import model_files_digest
from apcbatch.draft_sources import draft_sources
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.keys import KeyTable, id_key
from apcbatch.job.record import answers_of, read_record
from apcbatch.job.runfile import read_run_file, run_file_path
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.regular_files import open_regular_file
from apcbatch.types import DraftSource

# A longer line of an earlier OUT is left out: its token ids would take ten times as many bytes.
MOST_RECORD_BYTES = 16 << 20
LONGEST_MAGIC = max(map(len, COMPRESSED))


class EarlierAnswers:
    """Index of the answers in the OUT of an earlier run, by custom_id. Of records with equal ids, the last counts.

    Memory: 25 to 32 bytes per answer, plus one line at a time. A compressed OUT is decompressed to a temporary file
    without a name, since its lines are read in the order of the requests. has_same_tokens: whether that run had the
    same tokenizer, by the digest of the model's files in its run file. num_wanted, num_found, num_used: number of
    requests that were looked up, of those that had an answer, and of those that one was of use for.
    """

    def __init__(self, path: str, flag: str, model_folder: Path, warn: Callable[[str], None]) -> None:
        self._path, self._flag = path, flag
        self._file = self._open(warn)
        weakref.finalize(self, self._file.close)
        facts, _ = read_run_file(run_file_path(path))
        self.has_same_tokens = facts is not None and facts.get("model_files") == model_files_digest(model_folder)
        self._offsets = KeyTable()
        self.num_wanted = self.num_found = self.num_used = 0
        for offset, line in _lines(self._file):
            record = _answered(line)
            if record is not None:
                key = id_key(record["custom_id"])
                if not self._offsets.add(key, offset):
                    self._offsets.set(key, offset)

    @classmethod
    def of(cls, config: Config, model_folder: Path, warn: Callable[[str], None]) -> EarlierAnswers | None:
        """Index the file of --draft-from; None without the option. UsageError for a file that cannot be read."""
        if config.draft_from is None:
            return None
        return cls(config.draft_from, config.origins.get("draft_from", "draft_from"), model_folder, warn)

    def __len__(self) -> int:
        return len(self._offsets)

    def find(self, custom_id: str) -> dict[str, Any] | None:
        """Return the record of the request with this id, if it succeeded; None otherwise."""
        self.num_wanted += 1
        offset = self._offsets.get(id_key(custom_id))
        if offset is None:
            return None
        self._file.seek(offset)
        record = _answered(self._file.readline(MOST_RECORD_BYTES))
        if record is None or record["custom_id"] != custom_id:  # another program writes to the file
            return None
        self.num_found += 1
        return record

    def warn_if_unused(self, warn: Callable[[str], None]) -> None:
        """Warn if requests were looked up and no answer was of use."""
        if self.num_wanted and not self.num_used:
            why = f"none of its {len(self):,} answers has the custom_id of a request of this run"
            if self.num_found:
                why = f"the answers to {self.num_found:,} requests of this run hold no token of this model's vocabulary"
            warn(f"{self._flag} {self._path}: {why}, so that no draft was made from them")

    def _open(self, warn: Callable[[str], None]) -> BinaryIO:
        """Open the file, decompressed. If the compressed data is damaged or cut off, warn and use the part before."""
        file = open_earlier(self._path, self._flag)
        head = file.read(LONGEST_MAGIC)
        file.seek(0)
        if not head.startswith(tuple(COMPRESSED)):
            return file
        unpacked = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
        with file:
            try:
                for chunk in Stream(file).chunks():
                    unpacked.write(chunk)
            except BROKEN as error:
                warn(f"{self._flag} {self._path} cannot be read to its end: {reason(error)}; answers before are used")
        unpacked.seek(0)
        return unpacked


def open_earlier(path: str, flag: str) -> BinaryIO:
    """Open the OUT of an earlier run. flag: the option that names it. UsageError if it is not a readable file."""
    try:
        return open_regular_file(path)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {reason(error)}; give the OUT of an earlier run") from None


class References:
    """Known answers to the requests of a run. recorded: whether recorded answers are used. earlier: the answers of an
    earlier run, or None."""

    def __init__(self, renderer: Renderer, recorded: bool, earlier: EarlierAnswers | None) -> None:
        self._renderer, self._recorded, self.earlier = renderer, recorded, earlier

    @classmethod
    def of(cls, config: Config, renderer: Renderer, earlier: EarlierAnswers | None) -> References | None:
        """Return the known answers of a run; None if no draft source uses them."""
        recorded = "recorded" in draft_sources(config)
        return cls(renderer, recorded, earlier) if recorded or earlier is not None else None

    def begin(self, conversation: Conversation) -> KnownAnswers | None:
        """Return the KnownAnswers of a conversation, for its rendering and for `find`; None if it turns drafts off."""
        return KnownAnswers(self._renderer, conversation) if conversation.draft else None

    def find(
        self, known: KnownAnswers | None, conversation: Conversation, prompts: Sequence[Prompt]
    ) -> Mapping[int, Mapping[DraftSource, Sequence[TokenArray]]]:
        """Return turn -> source -> the known answers to that turn's prompt. known: the result of `begin`."""
        found: dict[int, dict[DraftSource, Sequence[TokenArray]]] = {}
        if known is None:
            return found
        try:
            if self._recorded:
                for turn, tokens in known.recorded(prompts).items():
                    found.setdefault(turn, {})["recorded"] = [tokens]
            if self.earlier is not None:
                for prompt in prompts:
                    answers = self._earlier_answers(self.earlier, known, conversation, prompt)
                    if answers:
                        self.earlier.num_used += 1
                        found.setdefault(prompt.turn, {})["previous"] = answers
        except Exception:  # the answers are the same without drafts
            return found
        return found

    def _earlier_answers(
        self, earlier: EarlierAnswers, known: KnownAnswers, conversation: Conversation, prompt: Prompt
    ) -> list[TokenArray]:
        """Return the tokens of each answer that the earlier run gave to the request with the prompt's custom_id: the
        recorded token ids if that run had the same tokenizer, otherwise the answer's text, tokenised. The last answers
        count if they have more than MOST_KNOWN_TOKENS together."""
        record, found, left = earlier.find(prompt.custom_id), list[TokenArray](), MOST_KNOWN_TOKENS
        if record is None:
            return found
        answers: list[Any] = answers_of(record) if earlier.has_same_tokens else record["response"]["body"]["choices"]
        for answer in reversed(answers):
            if earlier.has_same_tokens:
                tokens = known.of_tokens(as_token_array(answer[:MOST_KNOWN_TOKENS]))
            else:
                tokens = _of_choice(known, conversation, prompt, answer)
            if tokens is None:
                continue
            left -= len(tokens)
            if left < 0:
                break
            found.insert(0, tokens)
        return found


def _of_choice(
    known: KnownAnswers, conversation: Conversation, prompt: Prompt, choice: Mapping[str, Any]
) -> TokenArray | None:
    """Tokenise one choice of an earlier record: a chat message by the template, or as text if it continues the final
    message; a completion as text. None if the choice has no valid message or text."""
    try:
        [message] = check_messages([choice.get("message")]) if conversation.prompt is None else [None]
    except RequestError:
        return None
    if message is not None and not conversation.template_options.continue_final_message:
        return known.of_message(prompt, message)
    text = choice.get("text") if message is None else message["content"]
    if not isinstance(text, str):
        return None
    if conversation.params.get("echo") and isinstance(conversation.prompt, str):
        text = text.removeprefix(conversation.prompt)
    return known.of_text(text)


def _answered(line: bytes) -> dict[str, Any] | None:
    """Return the record of a request that succeeded and has a custom_id; None for any other line."""
    record = read_record(line)
    return record if record is not None and record["error"] is None and record["custom_id"] is not None else None


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) of each line, except lines over MOST_RECORD_BYTES."""
    offset = 0
    while line := file.readline(MOST_RECORD_BYTES):
        begin, offset = offset, offset + len(line)
        is_whole = line.endswith(b"\n") or len(line) < MOST_RECORD_BYTES
        while not is_whole and (rest := file.readline(MOST_RECORD_BYTES)):
            offset += len(rest)
            if rest.endswith(b"\n"):
                break
        if is_whole:
            yield begin, line
