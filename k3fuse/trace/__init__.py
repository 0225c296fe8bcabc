"""torch.fx -> graph: tracing a stock forward at two sizes into one typed graph."""

from k3fuse.trace.decode import trace_commit, trace_step
from k3fuse.trace.importer import trace
from k3fuse.trace.tracer import Arg

__all__ = ["Arg", "trace", "trace_commit", "trace_step"]
