"""Runs passes in order, with instruments around each, and leaves a reproducer when one fails."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from k3fuse.errors import InputError, K3FuseError, PassError
from k3fuse.ir import Graph, print_graph, verify
from k3fuse.passes.base import Pass, PassResult
from k3fuse.passes.instruments import Instrument


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    *,
    instruments: Sequence[Instrument] = (),
    bisect_limit: int | None = None,
    reproducer_dir: Path | None = None,
) -> list[PassResult]:
    """Run the passes on the graph in place; verify it after each that changed it.

    With `bisect_limit` N, optional passes after the N-th of the list are skipped; what every plan
    needs still runs, so the result compiles and can be checked. Raises PassError naming a
    reproducer file (IR before the pass, and the command that replays it).
    """
    results: list[PassResult] = []
    text = print_graph(graph)
    for instrument in instruments:
        instrument.start(graph, text)
    for index, item in enumerate(passes):
        if bisect_limit is not None and index >= bisect_limit and not item.required:
            continue
        before = text
        try:
            begin = time.perf_counter()
            result = item.run(graph)
            result.seconds = time.perf_counter() - begin
            if result.changes:
                verify(graph)
                text = print_graph(graph)
            for instrument in instruments:
                instrument.after(item, graph, result, before, text)
        except InputError:
            raise
        except Exception as error:
            path = _write_reproducer(before, item, reproducer_dir)
            kind = "" if isinstance(error, K3FuseError) else f"{type(error).__name__}: "
            raise PassError(
                f"pass {item.name} failed: {kind}{error}\n"
                f"reproduce: k3fuse opt {path} -p {item.name}"
            ) from error
        results.append(result)
    return results


def _write_reproducer(text: str, item: Pass, directory: Path | None) -> Path:
    home = directory if directory is not None else Path(tempfile.mkdtemp(prefix="k3fuse-"))
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"reproducer_{item.name}.ir"
    path.write_text(f"// the graph before {item.name}\n{text}")
    return path
