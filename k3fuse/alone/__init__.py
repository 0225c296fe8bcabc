"""One compiled launch alone on one GPU, held against the references of its ops, and timed.

`reference` says what a program computes, `inputs` draws what it reads, `memory` lays both out with
guards and peers' mailboxes as the kernel expects, `check` compares and `timing` times. Needs torch
and cuda.bindings, not the compiler.
"""
