"""Names of files: the place that an output's name leads to, and addresses such as `s3://bucket/chats.jsonl`.

Addresses of local files are recognised, others are opened with fsspec, and their secrets are hidden. Invariants:
- A file is written only at a place that `output_place` has returned.
- An address comes from the command line, never from data.
- The address of a local file is replaced by its path when options are read, so that every check sees the file itself.
- A printed address contains no user name, no password and no query, which may hold a signature.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from typing import Any, NoReturn
from urllib.parse import unquote

from apcbatch.errors import UsageError

HUB_PREFIX = "hf:"  # of a dataset or a model on the Hugging Face Hub
_PROTOCOL = r"[a-z][a-z0-9+.-]*"
_ADDRESS = re.compile(rf"{_PROTOCOL}(::{_PROTOCOL})*://", re.IGNORECASE)
_PROTOCOL_OF_LINK = re.compile(rf"^{_PROTOCOL}(?=://|$)", re.IGNORECASE)
_CACHES = r"(?:(?:simplecache|filecache|blockcache|cached)(?:://)?::)*"
_LOCAL = re.compile(rf"{_CACHES}(?:file|local|asynclocal):(?://(?:localhost(?=/))?)?(.*)", re.IGNORECASE | re.DOTALL)
_ARCHIVES = ("zip", "tar", "libarchive")
_WRAPPERS = ("dask", "dir", "generic", "reference")  # file systems that wrap another one, which would bypass checks
_READ_ONLY = ("http", "https", *_ARCHIVES)
# A password may hold any character: after `user:` everything up to the last @ counts as secret.
_USER = re.compile(r"(?<=://)(?:[^/@]*:.*|[^/]*)@", re.DOTALL)
_QUERY = re.compile(r"\?.*", re.DOTALL)
_SECRET_IN_TEXT = re.compile(r"(?<=://)[^/\s]*@|\?\S*")
_HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?(?!datasets/)([\w.-]+/[\w.-]+)(?!/resolve/)(?:[/?#].*)?$",
    re.I,
)
_LEAST_SECRET_CHARACTERS = 3  # shorter secrets are not removed from error messages
_NO_LAST_NAME = re.compile(r"(?:^|/)\.{0,2}$")  # of a name that is empty or ends in `/`, `/.` or `/..`
_MOST_LINKS = 40  # as many as Linux follows
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "hdfs": "pyarrow",
    "arrow_hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "libarchive": "libarchive-c",
    "dropbox": "dropboxdrivefs",
    **dict.fromkeys(("dbfs", "gist", "github", "jlab", "jupyter", "webhdfs"), "requests"),
}


def hub_page(name: str) -> str:
    """Return a clause that names the repository of a page of the Hugging Face Hub; empty for any other name, such as
    the address of a file there (`/resolve/`)."""
    match = _HUB_PAGE.match(name)
    return f" is a page of the Hugging Face Hub; give {HUB_PREFIX}{match[1]}" if match else ""


def is_address(name: str) -> bool:
    """Return whether a name begins with a protocol, such as `s3://`."""
    return _ADDRESS.match(name) is not None


def as_path(name: str) -> str:
    """Convert the address of a local file to its path: `file:///x`, `file:x`, `local://x`, `simplecache::file:///x`.

    Any other address is returned with its protocols in lower case, and any other name unchanged. As in fsspec, percent
    escapes are characters of the name, a path without a leading slash is relative, and `~` is the home folder.
    `//localhost/x` is `/x` (RFC 8089). Raises UsageError for a chain or a wrapper that could hide a local file.
    """
    if match := _LOCAL.fullmatch(name):
        path = os.path.expanduser(match[1])
        return path if path.startswith("/") else f"./{path}"  # never read as `-`, a dataset or an address
    if not is_address(name):
        return name
    *before, last = links = [_PROTOCOL_OF_LINK.sub(lambda match: match[0].lower(), link) for link in name.split("::")]
    for link in before:
        if not re.fullmatch(_CACHES, f"{link}::") and _protocol(link) not in _ARCHIVES:
            raise UsageError(
                f"{shown_address(name)} cannot be used: only caches (simplecache, filecache, blockcache) and archives "
                "(zip, tar) may stand before `::`; give the address behind it"
            )
    if _protocol(last) in _WRAPPERS:
        raise UsageError(f"{shown_address(name)} cannot be used: {_protocol(last)}:// wraps another address; give that")
    return "::".join(links)


def output_place(name: str) -> str:
    """Return the place that the name of an output file, a path or an address, leads to: what is checked and written.

    The folder is resolved. A link as last name is followed, through further links, to a file that need not exist yet.
    The place is relative if the name is and leads through no link. An open descriptor, such as /dev/stdout, becomes
    `/dev/fd/N`; `-` and addresses stay as they are. Raises UsageError for a name that ends in `/`, `/.` or `/..`, for a
    folder, for a descriptor that is not open, and for a file whose folder is missing.
    """
    path = as_path(name)
    if is_address(path):
        shown = shown_address(path)
        if not last_part(path) or _NO_LAST_NAME.search(shown):
            raise UsageError(f"{shown} has no file name; give one, such as s3://bucket/answers.jsonl")
        return path
    if path == "-":
        return path
    try:
        place = _followed(path)
        if os.path.isdir(place):
            raise _folder_error()
        if _is_descriptor(place) and not os.path.lexists(place):
            raise OSError(errno.EBADF, "no such descriptor is open")
        if places(path) != places(place):  # a folder below /proc that another process sees as its root
            raise OSError(errno.EINVAL, f"its path here is not {place}; give another name")
        is_lexical = place == os.path.abspath(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no file name"
        raise UsageError(f"{path} cannot be written: {reason}") from None
    if _is_descriptor(place):
        return f"/dev/fd/{os.path.basename(place)}" if place.startswith(f"/proc/{os.getpid()}/") else place
    if not is_lexical:
        return place
    near = os.path.normpath(path)
    return f"./{near}" if near == "-" or ":" in near.partition("/")[0] else near  # read again, it is this file


def is_stream(path: str) -> bool:
    """Return whether a path leads to an open descriptor (`/dev/stdin`), a pipe, a device or a socket. Such an output is
    written in place, and never replaced by a new file."""
    try:
        place = _followed(path)
        return _is_descriptor(place) or stat.S_IFMT(os.stat(place).st_mode) not in (stat.S_IFREG, stat.S_IFDIR)
    except (OSError, ValueError):
        return False


def _followed(path: str) -> str:
    """Return a path with its folder resolved and a link as its last name followed. Raises OSError, also for a path
    without a last name and for a missing folder; its `strerror` ends a sentence."""
    for _ in range(_MOST_LINKS):
        if _NO_LAST_NAME.search(path):
            raise _folder_error()
        folder = os.path.dirname(path) or "."
        try:
            is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
        except FileNotFoundError:
            way = f"its folder does not exist; mkdir -p {shlex.quote(folder)}"
            raise FileNotFoundError(errno.ENOENT, way) from None
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
        place = os.path.join(os.path.realpath(folder, strict=True), os.path.basename(path))
        if _is_descriptor(place):
            return place
        if _is_on_procfs(os.path.dirname(place)):  # such as /proc/self/exe, which leads to the running program
            raise OSError(errno.EINVAL, "of what lies on procfs only open descriptors, /proc/self/fd/N, can be written")
        try:
            path = os.path.join(os.path.dirname(place), os.readlink(place))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):  # there is nothing, or no link
                raise
            return place
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_descriptor(place: str) -> bool:
    """Return whether a place with a resolved folder is an open descriptor of a process, such as /proc/7/fd/1."""
    folder = os.path.dirname(place)
    return os.path.basename(folder) == "fd" and _is_on_procfs(folder)


def _is_on_procfs(folder: str) -> bool:
    return os.stat(folder).st_dev == os.stat("/proc/self").st_dev


def _folder_error() -> OSError:
    return IsADirectoryError(errno.EISDIR, "it names a folder; expected a file, such as out.jsonl")


def is_read_only(name: str) -> bool:
    """Return whether an address is read-only: a web page, or a file inside an archive."""
    return _protocol(re.sub(_CACHES, "", name, count=1)) in _READ_ONLY


def archive_of(name: str) -> str:
    """Return the end of an address that names the archive of its file, such as `::a.zip`; empty for any other file."""
    _, mark, rest = re.sub(_CACHES, "", name, count=1).partition("::")
    return mark + rest


def places(name: str, with_archive: bool = True) -> set[tuple[object, ...]]:
    """Return the identities of the files that a path or an address denotes.

    Two names of one file share an identity, even if the file does not exist yet. with_archive: for a file in a local
    archive, include the archive. Raises UsageError if the address needs a package that is missing.
    """
    if not is_address(name):
        try:
            status = os.stat(name)
        except (OSError, ValueError):
            return {("path", os.path.realpath(name))}
        return {("file", status.st_dev, status.st_ino)}
    bare = re.sub(_CACHES, "", name, count=1)
    archive = as_path(bare.rpartition("::")[2])
    system, path = open_filesystem(bare)
    normal = os.path.normpath(f"/{path.lstrip('/')}")
    host = type(system)._get_kwargs_from_urls(bare).get("host")
    found: set[tuple[object, ...]] = {(type(system), host, bare.partition("::")[2], normal)}
    return found if is_address(archive) or not with_archive else found | places(archive)


def shown_address(name: str) -> str:
    """Return an address without user, password and query; any other name unchanged."""
    return _QUERY.sub("", _USER.sub("", name)) if is_address(name) else name


def last_part(name: str) -> str:
    """Return the file name of a path or an address, such as `chats.jsonl`; empty if there is none."""
    path = name
    if is_address(name):
        path = shown_address(name).partition("://")[2].partition("::")[0]
        path = path if _protocol(name) in _ARCHIVES else path.partition("/")[2]
    return os.path.basename(path.rstrip("/"))


def open_filesystem(name: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address and the path in it. Raises UsageError if its package is missing."""
    from fsspec import core

    protocol = name.partition("://")[0].rpartition("::")[2].lower()
    try:
        url_to_fs: Any = core.url_to_fs
        system, path = url_to_fs(name)
    except ImportError:
        package = _PACKAGES.get(protocol) or _named_package(protocol)
        way = f"needs the package {package}; pip install {package}" if package else "is not read by the fsspec here"
        raise UsageError(f"{shown_address(name)} {way}") from None
    except Exception as error:  # a protocol's own package may raise anything
        refuse(name, "opened", error)
    return system, str(path)


def read_head(name: str, max_bytes: int, suffix: str = "") -> bytes | None:
    """Return the first max_bytes bytes of the object at address + suffix; None if it does not exist.

    Raises UsageError if the request fails.
    """
    system, path = open_filesystem(name)
    try:
        system.invalidate_cache()
        if not system.exists(path + suffix):
            return None
        with system.open(path + suffix, "rb") as file:
            return bytes(file.read(max_bytes))
    except Exception as error:  # a protocol's package may raise anything
        refuse(name, "used", error)


def refuse(name: str, done: str, error: BaseException) -> NoReturn:
    """Raise UsageError: an address cannot be opened, used, ... (`done`), because of an error."""
    raise UsageError(f"{shown_address(name)} cannot be {done}: {reason_of(error, name)}") from None


def reason_of(error: BaseException, name: str) -> str:
    """Return the first line of a file system's error, without the address's secrets."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = text.replace(name, shown_address(name))
    for secret in sorted(_secrets(name), key=len, reverse=True):
        text = text.replace(secret, "...")
    lines = text.strip().splitlines()
    return _SECRET_IN_TEXT.sub("", lines[0]).rstrip(".")[:300] if lines else type(error).__name__


def _protocol(link: str) -> str:
    return link.partition("://")[0].lower()


def _secrets(name: str) -> set[str]:
    """Return the secrets of an address: user with password, and the password alone, as written and percent-decoded."""
    if not is_address(name) or not (match := _USER.search(name)):
        return set()
    user = match[0][:-1]
    found = {user, user.partition(":")[2]}
    return {text for one in found for text in (one, unquote(one)) if len(text) >= _LEAST_SECRET_CHARACTERS}


def _named_package(protocol: str) -> str | None:
    """Return the package that fsspec's error says to install; None if it names none."""
    from fsspec.registry import known_implementations

    known: dict[str, Any] = known_implementations.get(protocol, {})
    found = re.search(r"[Ii]nstall ([a-z0-9_-]+) ", known.get("err", ""))
    return found[1] if found and found[1] != "the" else None
