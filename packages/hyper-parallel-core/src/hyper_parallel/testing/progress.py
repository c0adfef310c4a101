"""What a rank is busy with, for the report about one that does not return."""

from __future__ import annotations

import os
import threading

_file: int | None = None
_texts: dict[int, str] = {}


def write_to(file: int) -> None:
    """From now on keep it in this file, which another process reads when this one is stuck."""
    global _file
    _file = file


def busy_with(text: str) -> None:
    """Replace what was said before."""
    _texts[threading.get_ident()] = text
    if _file is not None:
        os.ftruncate(_file, 0)
        os.lseek(_file, 0, os.SEEK_SET)
        os.write(_file, f"{text}\n\n".encode() if text else b"")


def of_thread(ident: int) -> str:
    """What a thread of this process said last."""
    return _texts.get(ident, "")
