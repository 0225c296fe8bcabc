"""Kernels: what each supports, how it is configured, and how it becomes a cubin without a GPU.

`spec` declares kernels, `build` compiles and caches them, `device` holds the code that runs on the
GPU (the only modules that import the CuTe DSL).
"""
