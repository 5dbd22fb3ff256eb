"""Tables of tuned configs: what an entry says, how it is looked up, and how the file is kept safe.

There is one JSON file per GPU model.  The package ships some (`lmhead/configs/`), and a user has
one of their own, which `lmhead tune` writes.  Every entry says whether it was `measured`, with the
machine and all timings, or `modelled`, with the terms of the model (`lmhead.estimate`), and the
versions of torch and Triton that it was tuned under.

Lookup takes the user's measured entry, then the shipped measured one, the user's modelled one, the
shipped modelled one, and where there is none the default of `lmhead.kernels.config`.  An entry
whose config does not fit the device or the shape is passed over.

A file that cannot be used as a table is never lost.  Tuning refuses, before it begins, what it
cannot read (a directory, no permission) and what somebody else may be using (another format: a
newer lmhead's; another device).  What no lmhead could read (an empty file, one cut short) is
copied to a name that a warning gives, and a new table takes its place, so that a damaged cache
stops nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from lmhead import paths
from lmhead.kernels.config import (
    Arch,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    fits,
    from_dict,
    next_power_of_2,
    to_dict,
)

Config = GemmConfig | ReassembleConfig
Result = TypeVar("Result")
FORMAT = 1
SHIPPED = Path(__file__).parent / "configs"
# A bucket holds the row counts up to it and above the one before.  The sums of two powers of two
# are what the GEMM's two accumulators hold.
GEMM_BUCKETS = (16, 32, 64, 128, 160, 192, 256, 288, 320, 384, 512, 1024, 2048, 4096)
ORIGINS = ("measured", "modelled")
# A file system that several machines share answers a rename or a read with these now and then.
ATTEMPTS = 5
PAUSE_S = 0.05
# What asking again does not change.
LASTING = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.EINVAL, errno.ELOOP)


class NotOurs(ValueError):
    """A whole table, but of another format or of another device."""


class NotReplaced(OSError):
    """A file that stands where a table is to be written, and that is left as it is."""


@dataclass(frozen=True, order=True)
class Key:
    """What a config was chosen for.  Element sizes in bits: bf16 and fp16 run alike.  The epilogue
    is no part of it: every config is compiled with and without.

    kernel: "gemm", "reassemble" (in place) or "copy" (out of place).  hidden: H, 0 for the copying
    kernels.  ranks: N for the copying kernels, 0 for the GEMM, which knows T alone.  shard: S.
    rows: the bucket of T.  mode: what the time is of: "graph" replays, or "eager" calls with their
    launch cost.
    """

    kernel: str
    hidden: int
    ranks: int
    shard: int
    operand_bits: int
    out_bits: int
    mode: str
    rows: int


@dataclass(frozen=True)
class Entry:
    """A config and why it was chosen.  `us` is its time in microseconds; `details` are the model's
    terms, or machine, versions, date and all timings of a measurement.
    """

    config: Config
    origin: str
    us: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The config that a lookup came to, and where it is from: "measured (user)", "modelled
    (shipped)", "default", ...
    """

    config: Config
    source: str
    us: float | None = None


@dataclass
class Table:
    """One device's entries; per key at most one of each origin."""

    device: str
    entries: dict[Key, dict[str, Entry]] = field(default_factory=dict)

    def add(self, key: Key, entry: Entry) -> None:
        if entry.origin not in ORIGINS:
            raise ValueError(f"origin must be one of {ORIGINS}, got {entry.origin!r}")
        self.entries.setdefault(key, {})[entry.origin] = entry

    def merged(self, other: Table) -> Table:
        """These entries and `other`'s; `other`'s where both have one."""
        both = Table(self.device, {key: dict(found) for key, found in self.entries.items()})
        for key, found in other.entries.items():
            both.entries.setdefault(key, {}).update(found)
        return both

    def __len__(self) -> int:
        return sum(len(found) for found in self.entries.values())


def bucket(rows: int) -> int:
    """The bucket of T rows for the GEMM: the next of `GEMM_BUCKETS`; beyond them the last."""
    return next((size for size in GEMM_BUCKETS if rows <= size), GEMM_BUCKETS[-1])


def gemm_key(shape: GemmShape, mode: str = "graph") -> Key:
    return Key(
        "gemm",
        shape.hidden,
        0,
        shape.shard,
        8 * shape.itemsize,
        8 * shape.out_itemsize,
        mode,
        bucket(shape.rows),
    )


def reassemble_key(
    shape: ReassembleShape, in_place: bool, mode: str = "graph", out_itemsize: int | None = None
) -> Key:
    """The copying kernels' buckets of T = N*B are the powers of two up to 4096, a band's sizes."""
    kernel = "reassemble" if in_place else "copy"
    out_bits = 8 * (out_itemsize or shape.itemsize)
    rows = min(4096, next_power_of_2(shape.ranks * shape.rows))
    return Key(kernel, 0, shape.ranks, shape.shard, 8 * shape.itemsize, out_bits, mode, rows)


def look_up(
    user: Table | None,
    shipped: Table | None,
    key: Key,
    arch: Arch,
    shape: GemmShape | ReassembleShape,
) -> Choice:
    """The config for `shape`: a pure function of the tables, the architecture and the shape."""
    for origin in ORIGINS:
        for name, table in (("user", user), ("shipped", shipped)):
            entry = None if table is None else table.entries.get(key, {}).get(origin)
            if entry is not None and fits(entry.config, arch, shape):
                return Choice(entry.config, f"{origin} ({name})", entry.us)
    if isinstance(shape, GemmShape):
        return Choice(default_gemm(shape, arch), "default")
    return Choice(default_reassemble(shape, in_place=key.kernel == "reassemble"), "default")


# The file.


def user_folder() -> Path:
    """Where a user's tables are: LMHEAD_CONFIGS, or lmhead in the XDG cache directory; a leading ~
    is the home directory.  FileNotFoundError where there is neither, nor a home; ValueError where
    the home that is named is not known.
    """
    asked = os.environ.get("LMHEAD_CONFIGS")
    if asked:
        return paths.path(asked)
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return paths.path(cache) / "lmhead"
    try:
        return Path.home() / ".cache" / "lmhead"
    except RuntimeError as error:  # a user without a home, as containers have them
        raise FileNotFoundError(f"{error} Set LMHEAD_CONFIGS to a folder") from error


def load_shipped(device: str) -> Table | None:
    """The table that the package brings for a device ("b200"), or None."""
    path = SHIPPED / f"{device}.json"
    return parse(path.read_text(encoding="utf-8"), device) if path.is_file() else None


def load_user(device: str) -> Table | None:
    """The user's table, or None where there is none.  A file that cannot be read or understood is
    one warning, and as good as none: a broken cache must not take a server down.
    """
    path = Path(f"{device}.json")
    try:
        path = user_folder() / path
        text = _patiently(lambda: _read(_target(path)))
        return None if text is None else parse(text, device)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        kept = isinstance(error, OSError | NotOurs)
        then = "leaves it alone" if kept else "keeps a copy of it and writes a new one"
        warnings.warn(
            f"lmhead: the table of tuned configs {path} is not used ({error}); `lmhead tune` "
            f"{then}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def save(table: Table) -> Path:
    """Add a table's entries to the user's file and return its path.  An empty table creates the
    file, or finds out that it could not be.

    Whoever reads sees the old file or the new one, never half of one (written beside it, then
    renamed); two that save at the same time both end up in the file (one lock, and what is there is
    read again under it).  A symbolic link stays one: the file that it leads to is replaced.

    NotReplaced, which is an OSError, for a file that is not ours to replace (see `vacate`), OSError
    where the file system refuses, ValueError for LMHEAD_CONFIGS under an unknown home.
    """

    def attempt() -> Path:
        path = user_folder() / f"{table.device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_target(path)):
            there = _vacate(path, table.device)
            write(path, table if there is None else there.merged(table))
        return path

    return _patiently(attempt)


def save_user(table: Table) -> Path | None:
    """`save`, for results that go on without a file: None, after one warning, where it cannot be
    written.
    """
    try:
        return save(table)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"lmhead: tuned configs could not be written ({error})", RuntimeWarning, stacklevel=2
        )
        return None


def vacate(path: Path, device: str) -> Table | None:
    """Make sure that writing a table of `device` to `path` loses nothing but the table that is
    returned, which is what the file holds; None where there is no file.

    NotReplaced for what cannot be read (a directory, a device, no permission) and for a table of
    another format or device, which somebody may be using.  Anything else that is no table is copied
    to `<name>.unreadable` (or `-2`, ...) beside it, and a warning names the copy.
    """
    return _patiently(lambda: _vacate(path, device))


def _vacate(path: Path, device: str) -> Table | None:
    try:
        text = _read(_target(path))
        return None if text is None else parse(text, device)
    except NotOurs as error:
        raise _refusal(path, error) from error
    except OSError as error:
        if error.errno in LASTING:
            raise _refusal(path, error) from error
        raise
    except ValueError as error:
        kept = _copy(_target(path))
        warnings.warn(
            f"lmhead: {path} is no table of tuned configs ({error}): it is kept as {kept}, and a "
            "new table takes its place",
            RuntimeWarning,
            stacklevel=5,
        )
        return None


def _refusal(path: Path, error: Exception) -> NotReplaced:
    return NotReplaced(
        f"{path} is not replaced ({error}): move it away, or set LMHEAD_CONFIGS to another folder"
    )


def _copy(path: Path) -> Path:
    """A copy of a file beside it, under a name that was free or that has the same content."""
    content = path.read_bytes()
    for number in itertools.count(1):
        copy = path.with_name(f"{path.name}.unreadable" + (f"-{number}" if number > 1 else ""))
        try:
            with copy.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            if copy.is_file() and copy.read_bytes() == content:
                return copy
            continue
        shutil.copymode(path, copy)
        _sync_folder(path.parent)
        return copy
    raise AssertionError("unreachable")


def write(path: Path, table: Table) -> None:
    """Write a table so that a reader never sees half of it, and that a power failure leaves the old
    file or the new one.  What is there is replaced (`vacate` says whether it may be); a symbolic
    link stays, and the file that it leads to is replaced.
    """
    path = _target(path)
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        there = os.stat(path).st_mode
        if stat.S_ISDIR(there):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(there):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        mode = stat.S_IMODE(there)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dump(table))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have a new name in a folder outlive a power failure, where the file system can say so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def _target(path: Path) -> Path:
    """The file that a path leads to, through symbolic links; it need not exist."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time.  The lock is a file of its own, since the table's is replaced."""
    with open(path.with_name(f".{path.name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # A file system without locks: the rename alone still keeps every reader safe.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield


def _read(path: Path) -> str | None:
    """The text of a file, None where there is none.  OSError of a kind in LASTING for what is no
    file: a pipe or a device would be waited for.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        # What a shared file system may say of a file that was renamed into place just now.
        if path.parent.is_dir() and path.name in os.listdir(path.parent):
            raise
        return None


def _patiently(action: Callable[[], Result]) -> Result:
    """Repeat what a shared file system refuses for a moment; the last refusal counts."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except NotReplaced:
            raise
        except OSError as error:
            if error.errno in LASTING or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError("unreachable")


# Its text: one group per shape, one line per row bucket, so that a change is a readable diff.

_GROUP = ("kernel", "hidden", "ranks", "shard", "operand_bits", "out_bits", "mode")


def dump(table: Table) -> str:
    """A table as JSON."""
    groups: dict[tuple[Any, ...], list[tuple[int, Entry]]] = {}
    for key in sorted(table.entries):
        group = groups.setdefault(tuple(getattr(key, name) for name in _GROUP), [])
        found = table.entries[key]
        group.extend((key.rows, found[origin]) for origin in ORIGINS if origin in found)
    parts = []
    for values, entries in groups.items():
        head = json.dumps(dict(zip(_GROUP, values, strict=True)))[:-1]
        lines = ",\n".join(
            "   "
            + json.dumps(
                {
                    "rows": rows,
                    "config": to_dict(entry.config),
                    "origin": entry.origin,
                    "us": entry.us,
                    **entry.details,
                }
            )
            for rows, entry in entries
        )
        parts.append(f'  {head}, "entries": [\n{lines}\n  ]}}')
    body = ",\n".join(parts)
    return (
        f'{{\n "format": {FORMAT},\n "device": {json.dumps(table.device)},\n'
        f' "groups": [\n{body}\n ]\n}}\n'
    )


def parse(text: str, device: str | None = None) -> Table:
    """The inverse of `dump`.  ValueError for anything that is not a table (of `device`), and of
    that NotOurs for a table of another format or device.
    """
    try:
        found = json.loads(text)
        device = found["device"] if device is None else device
        if found["format"] != FORMAT or found["device"] != device:
            raise NotOurs(
                f"format {FORMAT} for {device!r} expected, got {found['format']!r} for "
                f"{found['device']!r}"
            )
        table = Table(device)
        for group in found["groups"]:
            shared = {name: group[name] for name in _GROUP}
            for line in group["entries"]:
                key = Key(**shared, rows=line["rows"])
                _require_plain(key)
                table.add(key, _entry(key, line))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no table of tuned configs: {type(error).__name__} {error}") from error
    return table


def _entry(key: Key, line: Mapping[str, Any]) -> Entry:
    rest = {
        name: value
        for name, value in line.items()
        if name not in ("rows", "config", "origin", "us")
    }
    kind = GemmConfig if key.kernel == "gemm" else ReassembleConfig
    us = line["us"]
    if isinstance(us, bool) or not isinstance(us, int | float) or not math.isfinite(us):
        raise ValueError(f"us must be a finite number, got {us!r}")
    config = from_dict(kind, line["config"])
    if isinstance(config, ReassembleConfig) and (config.kind == "copy") != (key.kernel == "copy"):
        raise ValueError(f"a {config.kind} config cannot serve {key.kernel!r}")
    return Entry(config, line["origin"], float(us), rest)


def _require_plain(key: Key) -> None:
    for name, value in asdict(key).items():
        want = {"kernel": str, "mode": str}.get(name, int)
        if type(value) is not want:
            raise ValueError(f"{name} must be {want.__name__}, got {value!r}")
    if key.kernel not in ("gemm", "reassemble", "copy"):
        raise ValueError(f"unknown kernel {key.kernel!r}")


def select(table: Table | None, wanted: Iterable[Key], device: str) -> Table:
    """The entries that serve any bucket of the shapes in `wanted`, without their details: what rank
    0 sends the others at warm-up.
    """
    shapes = {replace(key, rows=0) for key in wanted}
    found = Table(device)
    for key, entries in ({} if table is None else table.entries).items():
        if replace(key, rows=0) in shapes:
            for entry in entries.values():
                found.add(key, Entry(entry.config, entry.origin, entry.us))
    return found


# Versions.


def versions() -> dict[str, str]:
    """What an entry keeps of the software that it was tuned under."""
    return {"torch": torch.__version__, "triton": triton.__version__}


def other_versions(table: Table | None, wanted: Iterable[Key]) -> str:
    """Which releases of torch and Triton, other than those that run here, the best entries for the
    shapes in `wanted` were tuned under, in words; "" for none.

    A release is major.minor: code generation changes between Triton 3.6 and 3.8, and cuBLAS with
    torch's releases, while 2.13.0, 2.13.1 and 2.13.0+cu128 hold the same kernels.  An entry that
    names no versions says nothing.
    """
    here = {name: _release(version) for name, version in versions().items()}
    shapes = {replace(key, rows=0) for key in wanted}
    found = set()
    for key, entries in ({} if table is None else table.entries).items():
        if replace(key, rows=0) not in shapes:
            continue
        entry = next(entries[origin] for origin in ORIGINS if origin in entries)
        there = {name: _release(entry.details.get(name)) for name in here}
        if any(release not in ("", here[name]) for name, release in there.items()):
            found.add(" and ".join(f"{name} {there[name]}" for name in here if there[name]))
    return ", ".join(sorted(found))


def _release(version: object) -> str:
    """major.minor of a version; "" for what is none, since it may come from a file."""
    match = re.match(r"\d+\.\d+", version) if isinstance(version, str) else None
    return match[0] if match else ""
