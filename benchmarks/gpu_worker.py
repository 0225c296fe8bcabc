"""A process that works on a GPU, a JSON line for each result; a hang or a crash ends only it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any


class Worker:
    """Runs a command. `line` gives its results one by one, `why` says what ended it."""

    def __init__(self, command: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.put(text)
        self.lines.put(None)

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next result; None after the time limit or the end of the process."""
        limit = time.monotonic() + seconds
        while True:
            try:
                text = self.lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                return None
            if text is None:
                return None
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                print(text, end="", file=sys.stderr)

    def why(self, seconds: float) -> str:
        """Why there was no line for so long."""
        try:
            return f"the process ended with code {self.process.wait(timeout=2)}"
        except subprocess.TimeoutExpired:
            return f"no result after {seconds} s"

    def end(self) -> None:
        self.process.kill()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            print("a worker does not end; going on without it", file=sys.stderr)


def say(data: dict[str, Any]) -> None:
    """One line for the process that waits."""
    print(json.dumps(data), flush=True)


def gpu_facts() -> dict[str, str]:
    """GPU, driver and torch of this process; makes the CUDA context."""
    import torch

    torch.zeros(1, device="cuda")
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
    }
