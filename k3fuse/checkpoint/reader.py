"""Reads parameters out of a checkpoint one by one, touching only the bytes that are asked for.

Files are memory-mapped, so a checkpoint larger than RAM can be read, and a slice of a parameter
costs its own pages. Each parameter is copied once, from the mapped file to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from k3fuse.checkpoint.files import Checkpoint
from k3fuse.checkpoint.safetensors_header import TORCH_DTYPES, StoredTensor
from k3fuse.errors import CheckpointError
from k3fuse.parameter import ParameterSpec

Slice = tuple[int, int, int]
"""(dim, start, stop) of a parameter."""

E8M0_NAN = 255


def load_parameter(
    checkpoint: Checkpoint, spec: ParameterSpec, *, slice: Slice | None = None
) -> torch.Tensor:
    """One parameter in `spec.shape` and `spec.dtype` on the CPU, or the `slice` of it.

    Of a stacked parameter, a slice of dim 0 reads only those sources and one of another dim only
    those bytes of each source. Raises CheckpointError when a tensor is missing, has another shape,
    cannot be converted without loss, or is an MXFP4 scale with a NaN byte; ValueError when the
    slice is out of range.
    """
    shape = list(spec.shape)
    if slice is not None:
        dim, start, stop = slice
        if not (0 <= dim < len(shape) and 0 <= start <= stop <= shape[dim]):
            raise ValueError(f"slice {slice} is out of range for {spec.path} {list(spec.shape)}")
        shape[dim] = stop - start
    out = torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])
    _fill(checkpoint, spec, out, slice)
    return out


def iter_parameters(
    checkpoint: Checkpoint,
    specs: Iterable[ParameterSpec],
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """(spec, tensor) for each spec in order, one tensor at a time. `progress` gets the stored bytes
    of each parameter after it is read."""
    for spec in specs:
        tensor = load_parameter(checkpoint, spec)
        if progress is not None:
            progress(_stored_bytes(checkpoint, spec))
        yield spec, tensor


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    specs: Iterable[ParameterSpec],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill every parameter of `module` from the checkpoint, in place, tensor by tensor.

    A parameter on the meta device is replaced by a new CPU one of `spec.dtype`; others keep their
    device and dtype and are overwritten, which must lose nothing (bf16 into fp32 does not).
    Specs with the same sources (a tied lm_head) end up as one parameter with one storage.

    Raises CheckpointError, before any value is written, when paths or shapes of `specs` and
    `module` differ, and as `load_parameter` does.
    """
    specs = list(specs)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    paths = {spec.path for spec in specs}
    unmatched = sorted(paths ^ parameters.keys())
    if unmatched:
        raise CheckpointError(
            f"{checkpoint.directory}: {len(unmatched)} parameter(s) are in only one of the module "
            f"and the specs: {', '.join(unmatched[:20])}"
        )
    for spec in specs:
        shape = tuple(parameters[spec.path].shape)
        if shape != spec.shape:
            raise CheckpointError(
                f"parameter {spec.path}: module has {list(shape)}, spec has {list(spec.shape)}"
            )
    loaded: dict[tuple[str, ...], nn.Parameter] = {}
    for spec in specs:
        key = tuple(source.name for source in spec.sources)
        if key in loaded:
            _set_parameter(module, spec.path, loaded[key])
            continue
        parameter = parameters[spec.path]
        if parameter.is_meta:
            parameter = nn.Parameter(load_parameter(checkpoint, spec), requires_grad=False)
            _set_parameter(module, spec.path, parameter)
        else:
            _fill(checkpoint, spec, parameter.detach(), None)
        loaded[key] = parameter
        if progress is not None:
            progress(_stored_bytes(checkpoint, spec))


def check_scale(spec: ParameterSpec, stored: StoredTensor, values: torch.Tensor) -> None:
    """Raise CheckpointError when `values`, read from `stored`, are MXFP4 scales (a U8 parameter
    named `*_scale`) with a byte 255, which is NaN in E8M0."""
    if spec.dtype != "U8" or not spec.path.endswith("_scale"):
        return
    bad = int((values == E8M0_NAN).sum())
    if bad:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name}: {bad} scale byte(s) are 255, which is NaN"
        )


def _fill(
    checkpoint: Checkpoint, spec: ParameterSpec, out: torch.Tensor, cut: Slice | None
) -> None:
    """Write the parameter, or the `cut` of it, into `out` (any device, any wide enough dtype)."""
    if not spec.stacked:
        if len(spec.sources) != 1:
            raise CheckpointError(
                f"parameter {spec.path}: {len(spec.sources)} sources, not stacked"
            )
        _copy(checkpoint, spec, 0, spec.shape, out, cut)
    else:
        first = 0
        if cut is not None:
            dim, start, stop = cut
            first, cut = (start, None) if dim == 0 else (0, (dim - 1, start, stop))
        for row in range(out.shape[0]):
            _copy(checkpoint, spec, first + row, spec.shape[1:], out[row], cut)


def _copy(
    checkpoint: Checkpoint,
    spec: ParameterSpec,
    index: int,
    shape: tuple[int, ...],
    out: torch.Tensor,
    cut: Slice | None,
) -> None:
    source = spec.sources[index]
    stored = checkpoint.tensors.get(source.name)
    if stored is None:
        raise CheckpointError(f"{checkpoint.directory}: tensor {source.name} is missing")
    if (stored.shape, stored.dtype) != (source.shape, source.dtype):
        raise CheckpointError(
            f"{stored.file}: tensor {source.name} is {stored.dtype} {list(stored.shape)}, expected "
            f"{source.dtype} {list(source.shape)}"
        )
    dtype = TORCH_DTYPES[stored.dtype]
    # in bytes: data may be unaligned for its dtype, and a cut then reads only its own pages
    mapped = checkpoint.stored_bytes(source.name).view(*shape, dtype.itemsize)
    if cut is not None:
        mapped = mapped.narrow(cut[0], cut[1], cut[2] - cut[1])
    aligned = torch.empty(mapped.shape[:-1], dtype=dtype)
    aligned.view(-1).view(torch.uint8).view(mapped.shape).copy_(mapped)
    check_scale(spec, stored, aligned)
    floats = dtype.is_floating_point and out.dtype.is_floating_point
    if out.dtype != dtype and not floats:
        raise CheckpointError(f"parameter {spec.path}: {stored.dtype} cannot become {out.dtype}")
    out.copy_(aligned)
    narrower = torch.promote_types(dtype, out.dtype) != out.dtype
    if narrower and not torch.equal(out.to("cpu", dtype), aligned):
        raise CheckpointError(
            f"{stored.file}: tensor {source.name}: {stored.dtype} values do not fit {out.dtype} "
            f"without loss; load the model in {stored.dtype}"
        )


def _set_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)


def _stored_bytes(checkpoint: Checkpoint, spec: ParameterSpec) -> int:
    return sum(checkpoint.tensors[source.name].nbytes for source in spec.sources)
