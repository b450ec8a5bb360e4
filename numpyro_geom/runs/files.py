"""Atomic files, and a lock for one writer per directory.

Nothing is written through a symbolic link, and a file that may be a user's is never opened for
writing. A file is written under a new temporary name, in a folder that is not a link, and is then
renamed atomically.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = "lock"
HOLDER = re.compile(rb"(\d+( on [^\n]*)?\n)?")
"""Content of a lock file: empty, or the name of the last process that took it."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.new")
"""Names of files that are being written, or were being written when a process died."""


def own_folder(path: Path) -> None:
    """Make a folder; a FileExistsError if there is a link or something else in its place."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise FileExistsError(
            errno.EEXIST,
            f"{path} is {_kind(path)}: expected a folder of this run's making, or nothing. Move it "
            "away, or use another directory",
        )


def write_atomically(path: Path, *parts: Any, durable: bool = True) -> None:
    """Write a file such that a reader sees the old or the new file, even after a crash.

    Parts are bytes, or contiguous arrays of bytes. ``durable`` waits until the data are on disk.
    This protects against a loss of power; a killed process does not need it.
    """
    temporary = f".{path.name}.{secrets.token_hex(8)}.new"
    with _opened(path.parent) as folder:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except (Exception, KeyboardInterrupt):
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:  # also the entry in the folder
            os.fsync(folder)


def remove(path: Path) -> None:
    """Remove a file, if it exists, from a folder that is not a link."""
    with _opened(path.parent) as folder, contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=folder)


def remove_temporaries(folder: Path) -> None:
    """Remove the unfinished files of a process that died."""
    with os.scandir(folder) as found:
        for entry in found:
            if TEMPORARY.fullmatch(entry.name):
                os.unlink(entry.path)


@contextlib.contextmanager
def advised(advice: str) -> Iterator[None]:
    """Add advice to an error of the operating system; other errors have their own text."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror != os.strerror(error.errno):
            raise
        place = f" ({error.filename})" if error.filename else ""
        raise OSError(error.errno, f"{error.strerror}{place}: {advice}") from error


class Lock:
    """A lock of a directory against a second writer; it ends when the process dies.

    It is the lock of ``flock`` on a file. The file stays. The content of the file names the last
    holder. So a loss is detected even on file systems where ``flock`` does not work between hosts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / LOCK
        self._file = -1
        self._holder = f"{os.getpid()} on {socket.gethostname()}\n".encode()

    def take(self) -> None:
        """Make the directory if it is missing, and lock it; the errors are those of `run`."""
        directory = self.directory
        with advised(
            f"{directory} cannot hold a run. Expected a directory, made if it is missing, that is "
            "writable, with room, on a file system with `flock`, such as a local disk. Make it so "
            "and call `run` again with the same arguments, or use another directory"
        ):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._opened()
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, self._holder, 0)
                self.check()
            except BlockingIOError:
                holder = self._text().decode(errors="replace").strip()
                self.release()
                raise RuntimeError(
                    f"{directory} is being written by process {holder or 'unknown'}: expected one "
                    "writer, wait for it or stop it, or use another directory"
                ) from None
            except OSError:
                self.release()
                raise

    def check(self) -> None:
        """Raise an OSError unless this process still holds the directory."""
        found = ""
        try:
            here, held = os.lstat(self.path), os.fstat(self._file)
            if (here.st_dev, here.st_ino) != (held.st_dev, held.st_ino):
                found = "another file is in its place"
            elif self._text() != self._holder:
                holder = self._text().decode(errors="replace").strip()
                found = f"process {holder} took it, which a file system with locks does not allow"
        except FileNotFoundError:
            found = "it is gone"
        if found:
            raise OSError(
                errno.ENOLCK,
                f"the run has lost its lock {self.path}: {found}. Expected one writer, and what "
                "was stored until now is safe: see to it that no other process writes to the "
                "directory or clears it, and call `run` again with the same arguments",
            )

    def release(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _opened(self) -> int:
        """The lock file, made if it is missing; other files are not opened."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO):
                raise
            raise self._strange(_kind(self.path)) from error
        if not stat.S_ISREG(os.fstat(file).st_mode) or not HOLDER.fullmatch(os.pread(file, 300, 0)):
            os.close(file)
            raise self._strange(_kind(self.path))
        return file

    def _text(self) -> bytes:
        return os.pread(self._file, 300, 0)

    def _strange(self, found: str) -> FileExistsError:
        return FileExistsError(
            errno.EEXIST,
            f"{self.path} is {found}: expected a run's lock, or nothing. Move it away, or use "
            "another directory",
        )


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A folder that is no link, to be written to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _kind(path: Path) -> str:
    """What exists at the path of an expected file or folder."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {os.readlink(path)}"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file of other making" if stat.S_ISREG(mode) else "no regular file"
