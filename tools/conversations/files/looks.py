"""What people ask about files without changing anything. An errand returns False if the tree has nothing for it."""

from __future__ import annotations

from collections.abc import Callable

from conversations.files.tree import File, Tree
from conversations.toolset import Talk
from conversations.words import listed, plural

Errand = Callable[[Talk, Tree], bool]


def look(talk: Talk, tree: Tree, folder: str) -> list[File]:
    """List a folder."""
    talk.call("list", tree.listing(folder), folder=folder)
    return tree.inside(folder)


def spoken(talk: Talk, folder: str) -> str:
    """How the user names a folder."""
    return talk.rng.choice((folder, folder.rpartition("/")[2]))


def contents(talk: Talk, tree: Tree) -> bool:
    """What is in a folder."""
    folder = talk.rng.choice(tree.folders)
    talk.user(
        "What is in [the folder |]{folder}?",
        "[List|Show me] [the files in |]{folder}[, please|].",
        "Which files are in {folder}?",
        folder=spoken(talk, folder),
    )
    files, below = look(talk, tree, folder), tree.below(folder)
    names = [f"{file.name} ({file.size} KB)" for file in files]
    if not names:
        talk.say("There are no files in {folder}.", "{folder} is empty.", folder=folder)
        return True
    also = f", and the {'folders' if len(below) > 1 else 'folder'} {listed(below)}" if below else ""
    talk.say(
        "In {folder} I see {count}: {names}{also}.",
        "{count} in {folder}: {names}{also}.",
        count=plural(len(files), "file"),
        folder=folder,
        names=listed(names),
        also=also,
    )
    return True


def extreme(talk: Talk, tree: Tree) -> bool:
    """The largest, smallest, newest or oldest file of a folder."""
    folder = talk.rng.choice(tree.folders)
    files = tree.inside(folder)
    if len(files) < 2 or len({file.size for file in files}) < len(files):
        return False
    word = talk.rng.choice(("largest", "smallest", "newest", "oldest"))
    talk.user(
        "[Which|What] is the {word} file in {folder}?",
        "Find the {word} file in {folder}.",
        word=word,
        folder=spoken(talk, folder),
    )
    look(talk, tree, folder)
    by_size = word in ("largest", "smallest")
    order = sorted(files, key=lambda file: (file.size, 0) if by_size else (file.changed.toordinal(), file.size))
    file = order[-1] if word in ("largest", "newest") else order[0]
    detail = f"{file.size} KB" if by_size else f"changed on {file.changed}"
    talk.say(
        "It is {name}, {detail}.",
        "{name}, {detail}.",
        "The {word} one is {name}, {detail}.",
        name=file.name,
        detail=detail,
        word=word,
    )
    return True


def total(talk: Talk, tree: Tree) -> bool:
    """The size of a folder, or of its files of one kind."""
    folder = talk.rng.choice(tree.folders)
    files = tree.inside(folder)
    if not 2 <= len(files) <= 4:
        return False
    talk.user(
        "How large is {folder} in all?",
        "How much [space|room] do the files in {folder} take?",
        "[Add up|Sum] the sizes in {folder}.",
        folder=spoken(talk, folder),
    )
    look(talk, tree, folder)
    sizes = [file.size for file in files]
    talk.say(
        "{sum} = {total} KB.",
        "{total} KB in all: {sum}.",
        "The files take {sum} = {total} KB.",
        sum=" + ".join(map(str, sizes)),
        total=sum(sizes),
    )
    return True


def count(talk: Talk, tree: Tree) -> bool:
    """How many files there are, or how many of one kind."""
    folder = talk.rng.choice(tree.folders)
    files = tree.inside(folder)
    ending = talk.rng.choice(files).ending if files and talk.chance(0.6) else None
    said = spoken(talk, folder)
    if ending:
        talk.user(
            "How many {ending} files are in {folder}?",
            "Count the {ending} files in {folder}.",
            ending=ending,
            folder=said,
        )
    else:
        talk.user("How many files are in {folder}?", "Count the files in {folder}.", folder=said)
    look(talk, tree, folder)
    fit = [file.name for file in files if ending in (None, file.ending)]
    if not fit:
        talk.say("There are none.", "{folder} has no files.", folder=folder)
        return True
    talk.say("{count}: {names}.", count=plural(len(fit), f"{ending} file" if ending else "file"), names=listed(fit))
    return True


def read(talk: Talk, tree: Tree) -> bool:
    """A question that a file's text answers, and perhaps another one."""
    texts = [file for file in tree.files if file.ending in ("txt", "md", "docx", "pdf", "csv")]
    if not texts:
        return False
    file = talk.rng.choice(texts)
    text, facts = tree.text(file)
    if not facts:
        return False
    question, answer = facts.pop()
    known = talk.chance(0.6)
    talk.user(
        "{question} in {path}?",
        "[Look into|Read|Open] {path}: {low}?",
        "{question}? It is in {path}.",
        question=question,
        low=question[0].lower() + question[1:],
        path=file.path if known else file.name,
    )
    if not known:
        talk.call("find", {"paths": [file.path]}, text=file.name)
    talk.call("read", text, path=file.path)
    talk.say(answer)
    if facts and talk.chance(0.6):
        question, answer = facts.pop()
        talk.user("[And|Also,] {low}?", "{question}?", question=question, low=question[0].lower() + question[1:])
        talk.say(answer)
    if talk.chance(0.25):
        talk.user("[Does it say|Is there anything about] who wrote it?", "And who wrote it?")
        talk.say("No, {name} does not say that.", "That is not in {name}.", name=file.name)
    return True


def find(talk: Talk, tree: Tree) -> bool:
    """Where something is; it may be in several places, or nowhere."""
    file = talk.rng.choice(tree.files)
    text = file.name.partition(".")[0].replace("_", "-").split("-")[talk.rng.choice((0, 1))]
    if talk.chance(0.15):
        text = tree.new_name().rpartition(".")[0]
    paths = [found.path for found in tree.files if text in found.name]
    talk.user(
        "Where is the file with {text} in its name?",
        "[Find|Look for|Search for] {text}[, please|].",
        "[Do I have|Is there] a file [called|named] {text}?",
        text=text,
    )
    talk.call("find", {"paths": paths}, text=text)
    if not paths:
        talk.say("I found no file with {text} in its name.", "There is none[ with that name|].", text=text)
    elif len(paths) == 1:
        talk.say("It is {path}.", "I found it: {path}.", path=paths[0])
    else:
        talk.say("There are {n}: {paths}.", "I found {n}: {paths}.", n=len(paths), paths=listed(paths))
    return True


LOOKS: tuple[Errand, ...] = (contents, extreme, total, count, read, read, find)
