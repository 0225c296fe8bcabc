"""k3fuse compiles the decode step of large mixture-of-experts models into few checked launches."""

__version__ = "0.1.0"
