"""with full_float32(device): matrix products of float32 keep all of float32's digits.

No TF32, no bfloat16, no autocast. The setting belongs to the whole process: the first thread to
enter changes it, the last to leave restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _FullFloat32:
    """The setting before the first thread entered, and how many threads are inside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.general: str | None = None  # None: it was full already
        self.backends: list[tuple[Any, str]] = []

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self._enter()
            self.inside += 1
        try:
            with torch.autocast(device.type, enabled=False):
                yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self._leave()

    def _enter(self) -> None:
        try:
            general = torch.get_float32_matmul_precision()
            if general == "highest":
                return
        except RuntimeError:  # the backends have different settings
            general = "highest"
        matmuls: list[Any] = [
            getattr(backend, "matmul", None)
            for backend in (torch.backends.cuda, torch.backends.mkldnn)
        ]
        self.backends = [(m, m.fp32_precision) for m in matmuls if hasattr(m, "fp32_precision")]
        self.general = general
        torch.set_float32_matmul_precision("highest")

    def _leave(self) -> None:
        if self.general is not None:
            torch.set_float32_matmul_precision(self.general)
            for matmul, precision in self.backends:
                if matmul.fp32_precision != precision:
                    matmul.fp32_precision = precision
        self.general, self.backends = None, []


full_float32 = _FullFloat32()
