"""One pass on a graph written by hand: what it changed, and what it refused and why."""

from __future__ import annotations

from k3fuse.ir import parse_graph, verify
from k3fuse.passes.instruments import PrintChanged
from k3fuse.passes.manager import run_passes
from k3fuse.passes.pipeline import pass_named

TEXT = """
graph attention_input {dim.M=1, dim.R=1, target="gb300", tp=1} {
  input %x: bf16[M,64]
  input %moving: bf16[64,64]
  weight %wq: bf16[128,64]
  weight %wk: bf16[128,64]
  %q: bf16[M,128] = linear(%x, %wq)
  %k: bf16[M,128] = linear(%x, %wk)
  %s: bf16[M,64] = linear(%x, %moving)
  return %q, %k, %s
}
"""


def show(text: str) -> None:
    print(text, end="")


def main() -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    diff = PrintChanged(show)
    (result,) = run_passes(graph, [pass_named("merge-projections")], instruments=[diff])
    print(f"\n{result.changes} changes")
    for refusal in result.refusals:
        print(f"refused at {refusal.site}: {refusal.reason} ({refusal.value})")


if __name__ == "__main__":
    main()
