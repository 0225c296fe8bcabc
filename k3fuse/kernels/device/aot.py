"""From a kernel body to a cubin, on a machine without a GPU."""

import tempfile

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import AddressSpace, Int32
from cutlass.cute.runtime import make_fake_stream, nullptr

from k3fuse.errors import K3FuseError
from k3fuse.kernels.cubin import resources
from k3fuse.kernels.spec import CompiledKernel

ALIGNMENT = 16  # bytes, of every pointer


def compile_entry(
    body, params, element, *, name, arch, grid, block, smem, cluster=None
) -> CompiledKernel:
    """Compile `body(pointers, numbers)` for a launch with PDL.

    params: pointers ("u64") to `element` first, then numbers ("i32").
    """
    pointers = [p for p in params if p.kind == "u64"]
    numbers = [p for p in params if p.kind == "i32"]
    if [*pointers, *numbers] != list(params):
        raise K3FuseError(f"{name}: pointers come before numbers")
    shape = [1, 1, 1] if cluster is None else list(cluster)

    launch = {
        "grid": shape,
        "block": [block, 1, 1],
        "smem": smem,
        "cluster": None if cluster is None else shape,
        "use_pdl": True,
    }
    # The DSL takes no empty list as an argument.
    make = _with_numbers if numbers else _without_numbers
    host = make(body, name, launch)
    fakes = [nullptr(element, AddressSpace.gmem, assumed_align=ALIGNMENT) for _ in pointers]
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            host,
            fakes,
            *([[Int32(0) for _ in numbers]] if numbers else []),
            make_fake_stream(),
            no_jit_engine=True,
            options=f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {folder}",
        )
    (symbol,) = compiled.kernel_info
    cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
    listed = ptx.split(f"{symbol}(", 1)[1].split(")", 1)[0].count(".param")
    if listed != len(params):
        raise K3FuseError(f"{symbol}: {listed} parameters in the PTX, {len(params)} declared")
    used = resources(cubin, symbol)
    return CompiledKernel(
        name=name,
        arch=arch,
        symbol=symbol,
        cubin=cubin,
        ptx=ptx,
        params=tuple(params),
        grid=grid,
        block=(block, 1, 1),
        cluster=cluster,
        smem=smem,
        pdl=True,
        registers=used.registers,
        stack=used.stack,
        code=used.code,
    )


def _with_numbers(body, name, launch):
    @cute.kernel
    def entry(p: list[cute.Pointer], n: list[Int32]):
        body(p, n)

    entry.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(p: list[cute.Pointer], n: list[Int32], stream: CUstream):
        entry(p, n).launch(stream=stream, **launch)

    return host


def _without_numbers(body, name, launch):
    @cute.kernel
    def entry(p: list[cute.Pointer]):
        body(p)

    entry.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(p: list[cute.Pointer], stream: CUstream):
        entry(p).launch(stream=stream, **launch)

    return host
