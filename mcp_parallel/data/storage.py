"""Files by path or URL: local ones by the system, all others by fsspec. No torch, no numpy.

Keys, endpoints and options of a storage come from the environment alone (``FSSPEC_S3_KEY``, or what
its own library reads): a URL is written into run folders and logs, so one that carries a password
or a token is refused.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from mcp_parallel.errors import shown, shown_path

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Waits between tries: a storage that asks to slow down, or a host that restarts, is back by then.
_WAITS_S = (0.5, 2.0, 8.0)
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)


class StorageError(ValueError):
    """A URL that cannot be used or reached; names it and what was said."""


class Entry(NamedTuple):
    """A file of a listing."""

    name: str
    """Below the folder that was listed, with "/"."""
    path: str
    size: int
    stamp: str
    """Changes when the content does, as far as the storage tells: its time of change or its tag."""


def is_url(path: str) -> bool:
    """Whether ``path`` is for fsspec; ``file://`` names a local file."""
    return _URL.match(path) is not None and not path.lower().startswith("file://")


def local_path(path: str) -> Path:
    """The place on this machine, ``~`` expanded; of a path or a ``file://`` URL."""
    if path.lower().startswith("file://"):
        path = path[len("file://") :]
    return Path(path).expanduser()


def absolute(path: str) -> str:
    """``path`` such that it means the same from every directory."""
    return path if is_url(path) else str(local_path(path).absolute())


def below(folder: str, name: str) -> str:
    """The path of ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}"


def url_problem(url: str) -> tuple[str, str] | None:
    """(what it must be, what it is) of a URL that no network is needed to refuse."""
    parts = urlsplit(url)
    protocol = parts.scheme.lower()
    is_web = protocol in ("http", "https")
    if parts.password is not None or (is_web and (parts.username is not None or parts.query)):
        rule = "be a URL without a password or a query, which run folders and logs would keep"
        return rule, f"a {protocol}:// URL with one"
    if importlib.util.find_spec("fsspec") is None:
        return "have fsspec installed for URLs (pip install fsspec)", "no such package"
    from fsspec.registry import known_implementations, registry

    if protocol in registry:
        return None
    if protocol not in known_implementations:
        return "be a URL that fsspec knows, such as s3:// or hdfs://", shown_path(url)
    package = str(known_implementations[protocol]["class"]).partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"have {package} installed for {protocol}:// (pip install {package})", "none"
    return None


def opened(path: str) -> IO[bytes]:
    """``path`` opened for reading; of a URL, parts are fetched as they are read.

    Raises:
        StorageError: a URL that cannot be reached.
        OSError: a local file that cannot be read.
    """
    if not is_url(path):
        return local_path(path).open("rb")
    system, place = _system(path)
    return _tried(path, lambda: system.open(place, "rb"))


def created(url: str) -> IO[bytes]:
    """The URL opened for writing; what is there is replaced when the file is closed.

    Raises:
        StorageError: it cannot be reached.
    """
    system, place = _system(url)

    def create() -> IO[bytes]:
        _make_folder(system, place)
        return system.open(place, "wb")

    return _tried(url, create)


def content(path: str) -> bytes:
    """All of a file.

    Raises:
        StorageError: a URL that cannot be reached.
        OSError: a local file that cannot be read.
    """
    if not is_url(path):
        return local_path(path).read_bytes()
    system, place = _system(path)
    return _tried(path, lambda: system.cat_file(place))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes ``[start, stop)`` of a URL, tried again where the storage fails for a moment.

    Raises:
        StorageError: it cannot be reached, or gives another number of bytes.
    """
    system, place = _system(url)
    found = _tried(url, lambda: system.cat_file(place, start=start, end=stop))
    if len(found) != stop - start:
        raise StorageError(
            f"data: {url!a} must give the {stop - start} bytes from {start} on, got "
            f"{len(found)}; the file was cut, or its server does not answer ranges"
        )
    return found


def write(path: str, text: bytes) -> None:
    """Write a file, and the folders above it.

    Raises:
        StorageError: a URL that cannot be reached.
        OSError: a local file that cannot be written.
    """
    if not is_url(path):
        location = local_path(path)
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_bytes(text)
        return
    system, place = _system(path)

    def replace() -> None:
        _make_folder(system, place)
        system.pipe_file(place, text)

    _tried(path, replace)


def remove(path: str) -> None:
    """Remove a file, where it is; raises as ``write``."""
    if not is_url(path):
        local_path(path).unlink(missing_ok=True)
        return
    system, place = _system(path)
    if _tried(path, lambda: system.exists(place)):
        _tried(path, lambda: system.rm_file(place))


def size_of(path: str) -> int:
    """Bytes of a file.

    Raises:
        StorageError: a URL that cannot be reached.
        OSError: a local file that is not there.
    """
    if not is_url(path):
        return local_path(path).stat().st_size
    system, place = _system(path)
    return int(_tried(path, lambda: system.info(place))["size"])


def stamp_of(path: str) -> str:
    """Changes when the content does (see ``Entry.stamp``); raises as ``size_of``."""
    if not is_url(path):
        return str(local_path(path).stat().st_mtime_ns)
    system, place = _system(path)
    return _stamp(_tried(path, lambda: system.info(place)))


def listed(url: str) -> list[Entry]:
    """Files of a URL in the order of their names: those below a folder, or the one file.

    Raises:
        StorageError: it cannot be reached.
    """
    system, place = _system(url)

    def find() -> dict[str, Any]:
        system.invalidate_cache()
        return system.find(place, detail=True)

    entries = []
    protocol = url[: url.index("://")]
    for path, info in sorted(_tried(url, find).items()):
        name = path[len(place.rstrip("/")) :].lstrip("/") or path.rpartition("/")[2]
        full = path if "://" in path else f"{protocol}://{path.lstrip('/')}"
        entries.append(Entry(name, full, int(info.get("size") or 0), _stamp(info)))
    return entries


def _make_folder(system: Any, place: str) -> None:
    """The folder of a file, where the storage has such a thing."""
    if folder := place.rpartition("/")[0]:
        system.makedirs(folder, exist_ok=True)


def _stamp(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "mtime", "LastModified", "modified", "created", "size")
    return next(str(info[key]) for key in keys if info.get(key) is not None)


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the place in it; made anew in each process and thread.

    fsspec keeps them, and forgets those of the parent after a fork.
    """
    problem = url_problem(url)
    if problem is not None:
        rule, got = problem
        raise StorageError(f"data: a path must {rule}, got {got}; or copy the file here")
    from fsspec.core import url_to_fs

    return _tried(url, lambda: url_to_fs(url))


def _tried(url: str, action: Callable[[], T]) -> T:
    """``action``, tried again after what may pass.

    Whatever a storage's library raises becomes a ``StorageError``: each has errors of its own.
    """
    first: Exception | None = None
    for wait_s in (*_WAITS_S, None):
        try:
            return action()
        except Exception as raised:  # noqa: PERF203 (a try for each try)
            # The first says most: some libraries then only tell that they failed before.
            first = first or raised
            if wait_s is None or isinstance(raised, _FINAL):
                raise _as_storage_error(url, first) from first
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _as_storage_error(url: str, error: Exception) -> StorageError:
    if isinstance(error, StorageError):
        return error
    if isinstance(error, FileNotFoundError):
        return StorageError(f"data: {url!a} must exist, got no such file; check the address")
    words = shown(f"{type(error).__name__}: {error}")[1:-1]
    return StorageError(
        f"data: {url!a} must be reachable, got {words}; check the address, the network, and "
        "the keys in the environment"
    )
