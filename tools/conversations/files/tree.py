"""Tree: invented folders and files with sizes, days and short texts. Must not know: what is said about them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from conversations import words

FOLDERS = (
    "Documents", "Invoices", "Photos", "Projects", "Music", "Downloads", "Letters", "Contracts", "Recipes", "Plans",
    "Reports", "Scans", "School", "Travel", "Taxes", "Archive", "Drafts", "Minutes", "Garden", "House", "Videos",
    "Backups", "Clients", "Offers", "Forms", "Receipts", "Slides", "Notes", "Data", "Shared",
)  # fmt: skip
KINDS = (  # what a file is called, with the endings that it may have
    ("invoice", ("pdf",)), ("letter", ("docx", "pdf")), ("report", ("pdf", "docx")), ("notes", ("txt", "md")),
    ("photo", ("jpg", "png")), ("budget", ("xlsx", "csv")), ("contract", ("pdf",)), ("plan", ("pdf", "md")),
    ("scan", ("png", "pdf")), ("minutes", ("txt", "docx")), ("song", ("mp3", "flac")), ("offer", ("pdf",)),
    ("ticket", ("pdf",)), ("recipe", ("md", "txt")), ("list", ("txt", "csv")), ("slides", ("pptx", "pdf")),
    ("backup", ("zip",)), ("video", ("mp4",)), ("drawing", ("png", "svg")), ("script", ("py", "sh")),
)  # fmt: skip
FACTS = (  # a line of a text, what is asked about it, and the answer
    ("Deadline: {day}", "When is the deadline", "The deadline is {day}."),
    ("Amount due: {amount} euros", "What is the amount due", "{amount} euros are due."),
    ("Contact: {name}", "Who is the contact", "The contact is {name}."),
    ("Place: {town}", "Which place is named", "The place is {town}."),
    ("Reference: {ref}", "What is the reference", "The reference is {ref}."),
    ("Password hint: {word}", "What is the password hint", "The hint is {word}."),
    ("Serves {small} people", "How many people does it serve", "It serves {small} people."),
    ("Meeting room: {room}", "Which meeting room is it", "It is room {room}."),
    ("Delivery by {name}", "Who delivers", "{name} delivers."),
    ("Version {version}", "Which version is it", "It is version {version}."),
    ("Phone: {phone}", "What is the phone number", "The phone number is {phone}."),
    ("Chair: {name}", "Who has the chair", "{name} has the chair."),
    ("Next visit on {day}", "When is the next visit", "The next visit is on {day}."),
    ("Colour of the door: {word}", "What colour is the door", "The door is {word}."),
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "grey", "brown", "orange", "purple")


@dataclass
class File:
    """One file; size in kilobytes."""

    folder: str
    name: str
    size: int
    changed: date

    @property
    def path(self) -> str:
        """Folder and name."""
        return f"{self.folder}/{self.name}"

    @property
    def ending(self) -> str:
        """What comes after the last dot."""
        return self.name.rpartition(".")[2]

    def row(self) -> dict[str, Any]:
        """The file as it is listed."""
        return {"name": self.name, "size_kb": self.size, "changed": str(self.changed)}


class Tree:
    """Some folders with some files each."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.today = words.day(rng)
        root = rng.choice(("", "", "/home/" + words.given_name(rng).lower(), "/srv/share", "/data"))
        names = rng.sample(FOLDERS, rng.randrange(3, 6))
        self.folders = [f"{root}/{name}" for name in names]
        if rng.random() < 0.4:
            self.folders.append(f"{rng.choice(self.folders)}/{words.town(rng)}")
        self.root = root or "/"
        self.files: list[File] = []
        self._texts: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        for folder in self.folders:
            for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
                self.files.append(self.new_file(folder))

    def new_name(self) -> str:
        """A file's name, not used before."""
        rng = self.rng
        kind, endings = rng.choice(KINDS)
        middle = rng.choice(
            (
                words.family_name(rng).lower(),
                words.code(rng, "8999"),
                rng.choice(words.MONTHS).lower(),
                str(rng.randrange(2019, 2027)),
                words.town(rng).lower(),
                words.code(rng, "99"),
            )
        )
        name = f"{kind}{rng.choice('-_')}{middle}.{rng.choice(endings)}"
        return name if all(file.name != name for file in self.files) else self.new_name()

    def new_file(self, folder: str) -> File:
        """A file that is there."""
        rng = self.rng
        size = rng.choice((rng.randrange(1, 40), rng.randrange(10, 400), rng.randrange(100, 1000)))
        return File(folder, self.new_name(), size, self.today - timedelta(days=rng.randrange(1, 700)))

    def inside(self, folder: str) -> list[File]:
        """The files of a folder, by name."""
        return sorted((file for file in self.files if file.folder == folder), key=lambda file: file.name)

    def below(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""
        return sorted(f[len(folder) + 1 :] for f in self.folders if f.startswith(folder + "/"))

    def listing(self, folder: str) -> dict[str, Any]:
        """A folder as the list function returns it."""
        rows = [file.row() for file in self.inside(folder)]
        return {"folder": folder, "folders": self.below(folder), "files": rows}

    def text(self, file: File) -> tuple[str, list[tuple[str, str]]]:
        """The lines of a file, the same each time, with the questions that nobody has asked yet and their answers."""
        if file.name not in self._texts:
            self._texts[file.name] = self._new_text()
        return self._texts[file.name]

    def _new_text(self) -> tuple[str, list[tuple[str, str]]]:
        """Some lines, with a question and an answer about each of them, in another order."""
        rng = self.rng
        lines, asked = [], []
        for line, question, answer in rng.sample(FACTS, rng.randrange(2, 6)):
            values = {
                "day": words.day(rng), "amount": rng.randrange(20, 5000), "town": words.town(rng),
                "small": rng.randrange(2, 9),
                "name": f"{words.given_name(rng)} {words.family_name(rng)}", "ref": words.code(rng, "AA-99999"),
                "word": rng.choice(COLOURS), "room": rng.randrange(1, 400), "phone": words.code(rng, "0899 999999"),
                "version": f"{rng.randrange(1, 9)}.{rng.randrange(0, 20)}",
            }  # fmt: skip
            lines.append(line.format(**values))
            asked.append((question, answer.format(**values)))
        return "\n".join(lines), rng.sample(asked, len(asked))
