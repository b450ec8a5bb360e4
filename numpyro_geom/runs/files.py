"""Files that are there in full or not at all, one writer a directory, and signals that wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

LOCK = "lock"


def write_atomically(path: Path, *parts: Any, durable: bool = True) -> None:
    """Write a file such that a reader, and a crash at any instant, sees the old one or the new.

    Parts are bytes, or contiguous arrays of bytes. ``durable`` waits until the disk has them, which
    a loss of power needs and a killed process does not.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:  # the name in its directory too
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold a directory, made if missing, against a second writer; a dying process lets go of it.

    Raises:
        RuntimeError: if another run holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise RuntimeError(
                f"{directory} is being written by process {holder or 'unknown'}: expected one "
                "writer, wait for it or stop it, or use another directory"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """Take note of SIGINT and SIGTERM, by name, in place of ending; only in the main thread.

    A second SIGINT is a KeyboardInterrupt.
    """
    noted: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in old.items():
            # a handler that was not set from Python cannot be set from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
