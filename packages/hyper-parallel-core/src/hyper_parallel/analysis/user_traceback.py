"""A user's error as a traceback that begins in the user's own code."""

from __future__ import annotations

import importlib
import runpy
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parents[1])
_LOADERS = (runpy.__file__, importlib.__file__, "<frozen ")


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package, of ``runpy`` and of the import system that come first."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((_OURS, *_LOADERS)):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
