"""From a kernel body to a cubin, on a machine without a GPU."""

import tempfile

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import AddressSpace
from cutlass.cute.runtime import make_fake_stream, nullptr

from k3fuse.errors import K3FuseError
from k3fuse.kernels.cubin import resources
from k3fuse.kernels.spec import CompiledKernel, Parameter


def compile_pointers(
    body, params, *, name, arch, grid, block, smem, cluster=None
) -> CompiledKernel:
    """Compile `body(pointers)` for a launch with PDL.

    params: (name, access, element type, alignment in bytes) of each device pointer.
    """

    @cute.kernel
    def entry(p: list[cute.Pointer]):
        body(p)

    entry.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    shape = [1, 1, 1] if cluster is None else list(cluster)

    @cute.jit
    def host(p: list[cute.Pointer], stream: CUstream):
        entry(p).launch(
            grid=shape,
            block=[block, 1, 1],
            smem=smem,
            cluster=None if cluster is None else shape,
            stream=stream,
            use_pdl=True,
        )

    pointers = [
        nullptr(dtype, AddressSpace.gmem, assumed_align=align) for _, _, dtype, align in params
    ]
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            host,
            pointers,
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
        params=tuple(Parameter(n, "u64", access) for n, access, _, _ in params),
        grid=grid,
        block=(block, 1, 1),
        cluster=cluster,
        smem=smem,
        pdl=True,
        registers=used.registers,
        stack=used.stack,
        code=used.code,
    )
