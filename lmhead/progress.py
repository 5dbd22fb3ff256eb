"""Progress on standard error: a bar on a terminal where tqdm is installed, else a line now and
then.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

# Seconds between lines where there is no bar.
EVERY_S = 15.0


class Progress:
    """`with Progress("compiling", show=True) as bar: bar.at(done, total)`."""

    def __init__(self, label: str, *, show: bool = True) -> None:
        self._label, self._show = label, show
        self._bar: Any = None
        self._next = time.monotonic() + EVERY_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def at(self, done: int, total: int, note: str = "") -> None:
        """Say that `done` of `total` are done."""
        if not self._show:
            return
        if self._bar is None and importlib.util.find_spec("tqdm") and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._label, leave=False)
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            extra = f", {note}" if note else ""
            print(f"{self._label}: {done} of {total}{extra}", file=sys.stderr, flush=True)
