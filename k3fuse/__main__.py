"""`python -m k3fuse`."""

from k3fuse.cli import main

main()
