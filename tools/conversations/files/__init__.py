"""Conversations of an assistant that looks after files: listing, reading, finding, moving, renaming, deleting.

Must not know: how a conversation becomes tokens.
"""

from __future__ import annotations

from random import Random

from examples_text.script import Script

from conversations import words
from conversations.files.changes import CHANGES
from conversations.files.looks import LOOKS
from conversations.files.tree import Tree
from conversations.plain.small_talk import greet
from conversations.toolset import INTEGER, Function, Talk, Toolset, may, needs
from conversations.words import say

GREETED = 0.08  # of the conversations begin with hello alone
MAX_MESSAGES = 20
FOLDER = needs("folder|directory|dir|path", "A folder, from the top.|The path of a folder.")
PATH = needs("path|file|file_path|filename", "The path of a file.|Folder and name of the file.")
FUNCTIONS = {
    "list": Function(
        "list_files|list_folder|ls|show_folder|read_directory",
        "What is in a folder: names, sizes in KB, days of the last change.|List a folder.|Files and folders in a "
        "folder.",
        {"folder": FOLDER},
    ),
    "read": Function(
        "read_file|open_file|get_text|cat|show_file",
        "The text of a file.|Read a file. Returns its contents.|Open a file and return what is in it.",
        {"path": PATH},
    ),
    "find": Function(
        "find_files|search|search_files|locate",
        "The paths of all files whose name contains some text.|Search by name in all folders.",
        {"text": needs("text|query|name_contains", "A part of the name.")},
    ),
    "move": Function(
        "move_file|move|mv|put_into",
        "Move a file into another folder, which must be there.|Put a file elsewhere.",
        {"path": PATH, "folder": needs("to|target|new_folder|destination", "The folder to move it to.")},
    ),
    "rename": Function(
        "rename_file|rename|change_name",
        "Give a file another name in the same folder.|Rename a file. Fails if the name is taken.",
        {"path": PATH, "name": needs("new_name|name|to_name", "The new name, without a folder.")},
    ),
    "delete": Function(
        "delete_file|remove|rm|erase_file",
        "Delete a file for good.|Remove a file. It does not come back.",
        {"path": PATH},
    ),
    "folder": Function(
        "make_folder|mkdir|create_folder|new_directory", "Make a folder.|Create an empty folder.", {"folder": FOLDER}
    ),
    "write": Function(
        "write_file|save_file|create_file|put_text",
        "Write a text into a new file.|Make a file with this text.",
        {"path": PATH, "text": needs("text|content|contents", "What the file contains.")},
    ),
}
OTHERS = (
    Function("share_link|make_link", "A link to a file.", {"path": PATH, "days": may("days", "How long.", INTEGER)}),
    Function("zip_folder|compress", "Pack a folder.", {"folder": FOLDER}),
    Function("copy_file|cp", "Copy a file.", {"path": PATH, "to": needs("copy_to", "The folder of the copy.")}),
    Function("disk_space|free_space", "How much room is left, in MB.", {}),
)
ROLES = (
    "You [look after|manage|work with] the files of {who}.",
    "You are a file assistant[| for {who}]. [You can list, read and change files.|Use the functions for everything.|]",
    "You are [a helper|an assistant] with access to a shared drive.",
    "You help {who} to keep [order in the folders|the files in order].",
)
RULES = (
    "The folders are {folders}.",
    "The top folder is {root}.",
    "Ask before you delete anything.",
    "Give sizes in KB.",
    "Never delete a file without a clear yes.",
    "Answer briefly.",
    "Do not read files that nobody asked about.",
    "If a file is not where it should be, search for it.",
    "Name files by their full path when you have changed them.",
    "Say what you have done.",
    "One sentence is enough[| for most answers].",
    "Today is {today}.",
)


def system(rng: Random, tree: Tree) -> str:
    """Who the assistant is, where the files are, and some rules in any order."""
    rules = [RULES[0], *rng.sample(RULES[1:], rng.randrange(1, len(RULES)))]
    rng.shuffle(rules)
    joined = "\n".join(f"- {rule}" for rule in rules) if rng.random() < 0.3 else " ".join(rules)
    text = f"{say(rng, (rng.choice(ROLES),), who=words.given_name(rng))}{rng.choice((' ', chr(10)))}{joined}"
    text = say(rng, (text,), folders=words.listed(tree.folders), root=tree.root, today=tree.today)
    return text.replace(" \n", "\n").replace("  ", " ")


def conversation(rng: Random, name: str) -> Script:
    """One conversation of one to four errands."""
    tree = Tree(rng)
    toolset = Toolset(rng, FUNCTIONS, OTHERS)
    script = Script(name, system(rng, tree), toolset.tools)
    talk = Talk(rng, script, toolset)
    if rng.random() < GREETED:
        greet(talk)
    errands = [*LOOKS, *CHANGES]
    for errand in rng.sample(errands, rng.choice((1, 1, 2, 2, 3, 4))):
        before = list(script.messages)
        if errand(talk, tree) and len(script.messages) > MAX_MESSAGES:
            script.messages = before
            break  # the tree has changed with what is not said
    if len(script.messages) == 1:
        LOOKS[0](talk, tree)
    if rng.random() < 0.3 and len(script.messages) <= MAX_MESSAGES - 2:
        talk.user("[Thanks|Thank you|Great][!|, that's all.|. That was all.]", "[Good|Perfect], thanks.")
        talk.say("You're welcome[.|!]", "[Gladly|My pleasure].")
    return script
