"""What people want done with files: moved, renamed, deleted, written. An errand returns False if it does not fit."""

from __future__ import annotations

from conversations import words
from conversations.files.looks import Errand, look, spoken
from conversations.files.tree import FOLDERS, File, Tree
from conversations.toolset import Talk
from conversations.words import listed, plural

YES = ("Yes[|, please|, delete {it}|, go ahead].", "[OK|Sure], [do it|go ahead].", "[Please|Yes,] do.")
LONGEST_PATHS = 110  # characters of all paths in the calls of one answer
NO = ("No, [leave|keep] {it}.", "[Oh|Hm], no. [Keep|Leave] {it}.")


def fit_one_answer(files: list[File], to: str = "") -> bool:
    """Whether one answer can call a function for each of the files, with the folder that they go to, if any."""
    return 1 <= len(files) <= 2 and sum(len(file.path) + len(to) for file in files) <= LONGEST_PATHS


def move(talk: Talk, tree: Tree) -> bool:
    """A file into another folder, which may have to be made first, or the file may be elsewhere."""
    file = talk.rng.choice(tree.files)
    others = [folder for folder in tree.folders if folder != file.folder]
    new = talk.chance(0.25)
    to = talk.rng.choice(others)
    if new:
        top = tree.folders[0].rpartition("/")[0]
        to = f"{top}/{talk.rng.choice([name for name in FOLDERS if f'{top}/{name}' not in tree.folders])}"
    lost = talk.chance(0.2)
    said = f"{talk.rng.choice(others)}/{file.name}" if lost else file.path
    talk.user(
        "[Move|Please move|Put] {path} [to|into] {to}.",
        "{path} belongs in {to}. [Move it|Put it there], please.",
        path=said,
        to=to,
    )
    if lost:
        talk.call("move", {"error": f"there is no file {said}"}, path=said, folder=to)
        talk.call("find", {"paths": [file.path]}, text=file.name)
        talk.say("{said} is not there, but I found {path}. Shall I move that one?", said=said, path=file.path)
        talk.user("Yes[|, please|, that one].", "[OK|Sure], that is it.")
    if new:
        talk.call("move", {"error": f"there is no folder {to}"}, path=file.path, folder=to)
        talk.call("folder", {"made": to}, folder=to)
        tree.folders.append(to)
    before, file.folder = file.path, to
    talk.call("move", {"moved": file.path}, path=before, folder=to)
    made = f" I made the folder {to} for it." if new else ""
    talk.say(
        "[Done|Moved]: it is {path} now.{made}",
        "{name} is in {to} now.{made}",
        path=file.path,
        name=file.name,
        to=to,
        made=made,
    )
    return True


def rename(talk: Talk, tree: Tree) -> bool:
    """Another name, which may be taken."""
    file = talk.rng.choice(tree.files)
    name = tree.new_name().rpartition(".")[0] + "." + file.ending
    inside = [other for other in tree.inside(file.folder) if other is not file]
    taken = bool(inside) and talk.chance(0.3)
    wanted = talk.rng.choice(inside).name if taken else name
    talk.user(
        "[Rename|Please rename] {path} to {name}.", "[Call|Name] {path} {name}[, please|].", path=file.path, name=wanted
    )
    if taken:
        talk.call("rename", {"error": f"{wanted} is taken"}, path=file.path, name=wanted)
        talk.say(
            "There is already a {name} in {folder}. Which name shall I take instead?", name=wanted, folder=file.folder
        )
        talk.user("{name}[, then|].", "[Then take|Take] {name}.", name=name)
    before, file.name = file.path, name
    talk.call("rename", {"renamed": file.path}, path=before, name=name)
    talk.say("[Done|Renamed]: it is {path} now.", "It is called {name} now.", path=file.path, name=name)
    return True


def delete(talk: Talk, tree: Tree) -> bool:
    """One file, after a clear yes; it may be protected."""
    file = talk.rng.choice(tree.files)
    talk.user(
        "[Delete|Please delete|Remove|Get rid of] {path}.",
        "I don't need {path} any more. [Delete it|Please remove it].",
        path=file.path,
    )
    talk.say(
        "{path} would be gone for good. Shall I delete it?",
        "[Are you sure|Is that what you want]? {path} does not come back.",
        path=file.path,
    )
    if talk.chance(0.25):
        talk.user(*NO, it="it")
        talk.say("[OK|All right], {name} stays.", "Nothing was deleted.", name=file.name)
        return True
    talk.user(*YES, it="it")
    if talk.chance(0.15):
        talk.call("delete", {"error": "permission denied"}, path=file.path)
        talk.say("I can't delete {path}: permission denied. It is still there.", path=file.path)
        return True
    tree.files.remove(file)
    talk.call("delete", {"deleted": file.path}, path=file.path)
    talk.say("[Done|Deleted]: {path} is gone.", "{path} is deleted.", path=file.path)
    return True


def delete_kind(talk: Talk, tree: Tree) -> bool:
    """All files of one kind in a folder, after a clear yes, all at once."""
    folder = talk.rng.choice(tree.folders)
    files = tree.inside(folder)
    kinds = {file.ending: [f for f in files if f.ending == file.ending] for file in files}
    few = {ending: found for ending, found in kinds.items() if fit_one_answer(found)}
    if not few:
        return False
    ending, found = talk.rng.choice(list(few.items()))
    talk.user(
        "[Delete|Remove] all {ending} files in {folder}.",
        "[Clean up|Tidy] {folder}: the {ending} files can go.",
        ending=ending,
        folder=spoken(talk, folder),
    )
    look(talk, tree, folder)
    it = "it" if len(found) == 1 else "them"
    talk.say(
        "{count} would be gone for good: {names}. Shall I delete {it}?",
        count=plural(len(found), "file"),
        names=listed([file.name for file in found]),
        it=it,
    )
    if talk.chance(0.2):
        talk.user(*NO, it=it)
        talk.say("[OK|All right], nothing was deleted.")
        return True
    talk.user(*YES, it=it)
    talk.script.call(None, *(talk.toolset.call("delete", {"deleted": file.path}, path=file.path) for file in found))
    tree.files = [file for file in tree.files if file not in found]
    left = tree.inside(folder)
    rest = f"{plural(len(left), 'file')} {'is' if len(left) == 1 else 'are'} left" if left else "it has no files now"
    talk.say("[Done|Deleted]. In {folder} {rest}.", folder=folder, rest=rest)
    return True


def write(talk: Talk, tree: Tree) -> bool:
    """A new file with a short text."""
    folder = talk.rng.choice(tree.folders)
    rng = talk.rng
    kind, ending = rng.choice(("note", "todo", "memo", "reminder", "idea")), rng.choice(("txt", "md"))
    name = f"{kind}-{words.code(rng, '899')}.{ending}"
    text = words.say(
        rng,
        (
            "Call {name} on {day}.",
            "{name}: {phone}",
            "The key is with {name}.",
            "Buy {n} tickets to {town}.",
            "Meet {name} in {town} at {n}:00.",
            "Pay {n} euros to {name}.",
            "{town}, room {n}",
        ),
        name=f"{words.given_name(rng)} {words.family_name(rng)}",
        day=rng.choice(words.WEEKDAYS),
        phone=words.code(rng, "0899 999999"),
        town=words.town(rng),
        n=rng.randrange(8, 23),
    )
    talk.user(
        '[Write|Save] "{text}" to {path}.',
        "[Make|Create] a file {path} with this text: {text}",
        path=f"{folder}/{name}",
        text=text,
    )
    file = File(folder, name, 1, tree.today)
    tree.files.append(file)
    talk.call("write", {"written": file.path, "bytes": len(text)}, path=file.path, text=text)
    talk.say("[Done|Saved|Written]: {path}.", "{path} is there now.", path=file.path)
    return True


def move_several(talk: Talk, tree: Tree) -> bool:
    """All files with some text in their names, found first, then moved at once."""
    file = talk.rng.choice(tree.files)
    text = file.name.replace("_", "-").split("-")[0]
    found = [other for other in tree.files if text in other.name]
    to = talk.rng.choice(tree.folders)
    found_elsewhere = [other for other in found if other.folder != to]
    if not fit_one_answer(found_elsewhere, to) or len(found) > 5:
        return False
    talk.user(
        "[Move|Put] every file with {text} in its name into {to}.",
        "[Collect|Gather] all {text} files in {to}.",
        text=text,
        to=to,
    )
    talk.call("find", {"paths": [other.path for other in found]}, text=text)
    moves = []
    for other in found_elsewhere:
        before, other.folder = other.path, to
        moves.append(talk.toolset.call("move", {"moved": other.path}, path=before, folder=to))
    talk.script.call(None, *moves)
    talk.say("[Done|Moved]: {to} has {names} now.", names=listed([o.name for o in found_elsewhere]), to=to)
    return True


CHANGES: tuple[Errand, ...] = (move, rename, delete, delete_kind, write, move_several)
