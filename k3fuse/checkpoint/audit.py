"""Compares a checkpoint with what a model needs, both ways, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3fuse.checkpoint.files import Checkpoint
from k3fuse.checkpoint.reader import check_scale
from k3fuse.errors import CheckpointError
from k3fuse.parameter import ParameterSpec, TensorSpec

OTHER_MODALITIES = ("vision_tower.", "mm_projector.")
_HEAD = "lm_head.weight"
_MAX_LISTED = 20


@dataclass(frozen=True)
class AuditReport:
    """A checkpoint that passed. Counts and bytes are of stored tensors, each counted once;
    `aliases` are parameters that share another parameter's tensor."""

    tensors: int
    nbytes: int
    ignored_tensors: int
    ignored_bytes: int
    aliases: tuple[str, ...]
    notes: tuple[str, ...]


def audit(
    checkpoint: Checkpoint,
    specs: Iterable[ParameterSpec],
    *,
    tied: bool,
    ignore_prefixes: tuple[str, ...] = OTHER_MODALITIES,
    values: bool = False,
) -> AuditReport:
    """Check that `checkpoint` holds exactly the tensors of `specs`, with their shapes and dtypes.

    Tensors whose name starts with one of `ignore_prefixes` belong to other modalities and are
    counted, not checked. `tied` is the config's tie_word_embeddings: then lm_head may share the
    embedding's tensor (its spec has that source); a tied config whose checkpoint has an lm_head of
    its own gets a note, and that tensor is what the model uses, since dropping stored weights could
    change results and keeping them cannot. `values` also reads every MXFP4 scale and refuses NaN.

    Raises one CheckpointError that lists all problems (the first 20, and how many there are).
    """
    specs = list(specs)
    wanted: dict[str, TensorSpec] = {}
    aliases: list[str] = []
    for spec in specs:
        if all(source.name in wanted for source in spec.sources):
            aliases.append(spec.path)
        wanted.update((source.name, source) for source in spec.sources)

    problems: list[str] = []
    for source in wanted.values():
        stored = checkpoint.tensors.get(source.name)
        if stored is None:
            problems.append(f"{source.name}: missing{_tie_hint(source.name, tied)}")
            continue
        where = f"{source.name} ({stored.file.name})"
        if stored.shape != source.shape:
            problems.append(f"{where}: shape {_list(stored.shape)}, not {_list(source.shape)}")
        if stored.dtype != source.dtype:
            problems.append(f"{where}: dtype {stored.dtype}, not {source.dtype}")
    ignored = [name for name in checkpoint.tensors if name.startswith(ignore_prefixes)]
    for name in checkpoint.tensors.keys() - wanted.keys() - set(ignored):
        where = checkpoint.tensors[name].file.name
        problems.append(f"{name} ({where}): extra, the model has no such tensor")
    if values and not problems:
        problems += _scale_problems(checkpoint, specs)
    if problems:
        problems.sort()
        raise CheckpointError(
            f"{checkpoint.directory}: {len(problems)} problem(s) with the tensors:\n  "
            + "\n  ".join(problems[:_MAX_LISTED])
            + (f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else "")
        )

    notes = list(checkpoint.notes)
    own_heads = [name for name in wanted if name.endswith(_HEAD)]
    if tied and own_heads:
        notes.append(f"config ties the embeddings, but {own_heads[0]} is stored and is used")
    return AuditReport(
        tensors=len(wanted),
        nbytes=sum(checkpoint.tensors[name].nbytes for name in wanted),
        ignored_tensors=len(ignored),
        ignored_bytes=sum(checkpoint.tensors[name].nbytes for name in ignored),
        aliases=tuple(aliases),
        notes=tuple(notes),
    )


def _tie_hint(name: str, tied: bool) -> str:
    if tied or not name.endswith(_HEAD):
        return ""
    return " (the config has tie_word_embeddings false)"


def _list(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _scale_problems(checkpoint: Checkpoint, specs: list[ParameterSpec]) -> list[str]:
    problems: list[str] = []
    for spec in specs:
        for source in spec.sources:
            try:
                check_scale(
                    spec,
                    checkpoint.tensors[source.name],
                    checkpoint.stored_bytes(source.name),
                )
            except CheckpointError as error:
                problems.append(str(error))
    return problems
