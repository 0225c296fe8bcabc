"""A bundle on this machine's GPU: load it, then every step is one replay of a CUDA graph.

    engine = Engine.load(bundle, checkpoint_shards(...), VirtualRanks(1))
    result = engine.step(inputs, rows_per_request=1, mode="commit")

A step copies its inputs into one buffer, replays the graph of its bucket and returns views of
device memory, which the next step overwrites. Nothing is allocated and Python sees no launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.errors import InputError, PeerFailedError
from k3fuse.models.kimi import Mode, StepInputs
from k3fuse.runtime.bundle import Bucket, Bundle
from k3fuse.runtime.executor import Capacity, StepResult
from k3fuse.runtime.gpu.error_record import read_error_record
from k3fuse.runtime.gpu.layout import BucketLayout, MemoryLayout, layout_of
from k3fuse.runtime.gpu.memory import RankMemory, allocate
from k3fuse.runtime.gpu.op_by_op import OpByOp
from k3fuse.runtime.gpu.partition import Streams, rank_streams, sm_count
from k3fuse.runtime.gpu.ranks import RankMode
from k3fuse.runtime.gpu.staging import Staging
from k3fuse.runtime.gpu.step import BoundStep
from k3fuse.runtime.gpu.weights import load_weights
from k3fuse.runtime.launcher import DriverError, KernelFolder
from k3fuse.runtime.weights import LoadShard
from k3fuse.target import get_target

WAIT_SECONDS = 30.0
"""How long a step may take before it counts as hung."""

MARGIN = 512 * 2**20
"""Bytes that stay free beside the plan's memory, for kernels and torch."""


@dataclass
class _Rank:
    """One rank of this process."""

    memory: RankMemory
    streams: Streams
    steps: dict[Bucket, BoundStep] = field(default_factory=dict[Bucket, BoundStep])
    graphs: dict[Bucket, torch.cuda.CUDAGraph] = field(
        default_factory=dict[Bucket, torch.cuda.CUDAGraph]
    )


class Engine:
    """The buckets of a bundle, captured, with the state of all requests. An `Executor`.

    Made by `Engine.load`. `eager=True` on a call launches the same kernels one by one.
    """

    def __init__(self, bundle: Bundle, layout: MemoryLayout, mode: RankMode) -> None:
        self.bundle, self.layout, self.mode = bundle, layout, mode
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._check_device()
        target = get_target(bundle.manifest.target)
        streams = rank_streams(len(mode.mine), target.sm_count, self.device)
        memories = allocate(layout, mode, self.device)
        self._ranks = [
            _Rank(memory, own) for memory, own in zip(memories.values(), streams, strict=True)
        ]
        manifest = bundle.kernels()
        self.records = {} if manifest is None else manifest.by_name()
        self._staging = {bucket: Staging(found) for bucket, found in layout.buckets.items()}
        self._counts = dict.fromkeys(layout.buckets, 0)
        self._prefill: OpByOp | None = None

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        load: LoadShard,
        mode: RankMode,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Engine:
        """Allocate, load the weights, warm up and capture every bucket on the current CUDA device.

        `load` gives what a rank holds of a parameter (`gpu.weights`). `progress` gets the name of
        the stage, what is done and what is to do. Raises InputError for a GPU that the bundle was
        not compiled for, too little memory (naming the bytes), a kernel that does not load, and a
        parameter that does not fit.
        """
        layout = layout_of(bundle)
        if mode.tp != layout.tp:
            raise InputError(
                f"the bundle was compiled with --tp {layout.tp}, not for {mode.tp} ranks"
            )
        tell = progress or _silent
        try:
            engine = cls(bundle, layout, mode)
            engine.load_weights(load, lambda done: tell("load weights", done, layout.weight_bytes))
            engine.reset(range(engine.capacity.slots))
            kernels = KernelFolder(bundle.kernel_folder)
            for number, bucket in enumerate(layout.buckets):
                engine._bind(bucket, kernels)
                tell("capture", number + 1, len(layout.buckets))
        except torch.OutOfMemoryError as error:
            raise InputError(f"out of GPU memory: {error}") from None
        return engine

    def load_weights(self, load: LoadShard, progress: Callable[[int], None] | None = None) -> None:
        """Write all weights to their places; also to replace them later, which keeps addresses.

        `progress` gets the bytes of one rank that are loaded so far.
        """
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done)

        torch.cuda.synchronize(self.device)
        memories = {rank.memory.rank: rank.memory for rank in self._ranks}
        load_weights(self.bundle.recipe(), load, memories, count)
        torch.cuda.synchronize(self.device)

    @property
    def vocab_size(self) -> int:
        for found in self.layout.buckets.values():
            if "logits" in found.output_types:
                size = found.output_types["logits"].shape[-1]
                assert isinstance(size, int)
                return size
        raise InputError(f"{self.bundle.directory} has no step that gives logits")

    @property
    def capacity(self) -> Capacity:
        return Capacity.of(self.bundle.options)

    def prefill(self, inputs: StepInputs, rows_per_request: int) -> StepResult:
        """As `Executor.prefill`: the step op by op on the same weights and states, any rows."""
        if self._prefill is None:
            self._prefill = self._op_by_op()
        given = {name: tensor.to(self.device) for name, tensor in inputs._asdict().items()}
        out = self._prefill(given, rows_per_request)
        return StepResult(out["logits"], out["tokens"], out["hidden"])

    def step(
        self, inputs: StepInputs, rows_per_request: int, mode: Mode, *, eager: bool = False
    ) -> StepResult:
        """As `Executor.step`. Waits for the step; PeerFailedError with a report when it hangs."""
        if (mode == "verify") != (rows_per_request > 1):
            raise InputError(f"mode {mode} with {rows_per_request} rows a request is not compiled")
        bucket = self._bucket("step", inputs.slots.shape[0], rows_per_request)
        self.run(bucket, inputs._asdict(), eager=eager)
        self.wait()
        return self.result(bucket)

    def commit(self, slots: Tensor, accepted: Tensor, *, eager: bool = False) -> None:
        """As `Executor.commit`."""
        rows = self.capacity.rows
        bucket = self._bucket("commit", slots.shape[0], rows)
        self.run(bucket, {"slots": slots, "accepted": accepted}, eager=eager)
        self.wait()

    def reset(self, slots: Sequence[int]) -> None:
        """As `Executor.reset`."""
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for rank in self._ranks:
            for name in self.layout.slotted:
                rank.memory.states[name].index_fill_(0, index, 0)

    def run(self, bucket: Bucket, tensors: Mapping[str, Tensor], *, eager: bool = False) -> None:
        """Put one step of a bucket on the GPU and return at once. tensors: the step inputs by the
        last part of their name, on the CPU."""
        staged = self._staging[bucket].fill(tensors, self._counts[bucket])
        self._counts[bucket] += 1
        current = torch.cuda.current_stream(self.device)
        for rank in self._ranks:
            main = rank.streams["main"]
            main.wait_stream(current)
            with torch.cuda.stream(main):
                staged.copy_to(rank.memory.buckets[bucket].input_bytes)
        if eager:
            self._launch(bucket)
        else:
            for rank in self._ranks:
                with torch.cuda.stream(rank.streams["main"]):
                    rank.graphs[bucket].replay()
        for rank in self._ranks:
            current.wait_stream(rank.streams["main"])

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Return when the GPU has done all it was given.

        PeerFailedError after `seconds`, and when a debug kernel has given up, with its record. What
        hangs cannot be stopped: the process has to end then, by `os._exit` if need be.
        """
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        limit = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > limit:
                raise PeerFailedError(
                    f"no end of the step after {seconds:.0f} s ({self.mode.label}): a peer is lost "
                    "or a kernel waits for what never comes; debug kernels (compile --debug) say "
                    "which"
                )
        for rank in self._ranks:
            report = read_error_record(rank.memory.errors) if self.bundle.options.debug else ""
            if report:
                raise PeerFailedError(report)

    def result(self, bucket: Bucket) -> StepResult:
        """The outputs of the last step of a bucket, whole; valid until the next step."""
        outputs: dict[str, Tensor] = {}
        for name, type_ in self.layout.buckets[bucket].output_types.items():
            held = [rank.memory.buckets[bucket].outputs[name] for rank in self._ranks]
            if type_.placement.is_shard and self.mode.tp > 1:
                outputs[name] = torch.cat(self.mode.gather(held), type_.placement.dim)
            else:
                outputs[name] = held[0]
        return StepResult(outputs["logits"], outputs["tokens"], outputs["hidden"])

    def outputs(self, bucket: Bucket, rank: int = 0) -> Mapping[str, Tensor]:
        """What the rank at that place of this process holds of the outputs, without a copy."""
        return self._ranks[rank].memory.buckets[bucket].outputs

    def states(self, rank: int = 0) -> Mapping[str, Tensor]:
        """The state tensors that the rank at that place of this process holds, by name."""
        return self._ranks[rank].memory.states

    def _op_by_op(self) -> OpByOp:
        plain = [b for b in self.layout.buckets if b.kind == "step" and b.rows_per_request == 1]
        if not plain:
            raise InputError(
                f"{self.bundle.directory} has no bucket of one row a request to prefill"
            )
        memories = [rank.memory for rank in self._ranks]
        return OpByOp(
            self.bundle.graph(plain[0]),
            {name: [m.weights[name] for m in memories] for name in self.layout.weights},
            {name: [m.states[name] for m in memories] for name in self.layout.states},
            self.mode.mine,
            self.mode.gather,
        )

    def _bind(self, bucket: Bucket, kernels: KernelFolder) -> None:
        """Bind the launches of a bucket, run them once on nothing but padding, capture them."""
        for rank in self._ranks:
            rank.steps[bucket] = BoundStep.bind(rank.memory, bucket, kernels, rank.streams)
        self.mode.barrier()
        self.run(bucket, self._padding(self.layout.buckets[bucket]), eager=True)
        self.wait()
        for rank in self._ranks:
            try:
                rank.graphs[bucket] = rank.steps[bucket].capture()
            except (RuntimeError, DriverError) as error:
                reason = (str(error).splitlines() or ["no reason given"])[0]
                raise InputError(
                    f"{bucket}: its launches cannot be captured in a CUDA graph ({reason}): "
                    "k3fuse doctor shows driver and torch, which may be too old"
                ) from error
        self.mode.barrier()

    def _launch(self, bucket: Bucket) -> None:
        """The launches of all ranks in turn, so that none waits for one that is not queued yet."""
        for rank in self._ranks:
            rank.steps[bucket].begin()
        for position in range(len(self.layout.buckets[bucket].plan.launches)):
            for rank in self._ranks:
                rank.steps[bucket].put(position)

    def _padding(self, found: BucketLayout) -> dict[str, Tensor]:
        """Inputs of a step without requests: it changes no state."""
        fill = {"slots": -1, "block_table": -1}
        return {
            (name := full.rpartition(".")[2]): torch.full(
                place.shape, fill.get(name, 0), dtype=place.dtype.to_torch()
            )
            for full, place in found.inputs.items()
            if full != "step"
        }

    def _bucket(self, kind: str, batch: int, rows: int) -> Bucket:
        for bucket in self.layout.buckets:
            if (bucket.kind, bucket.batch, bucket.rows_per_request) == (kind, batch, rows):
                return bucket
        have = ", ".join(str(b) for b in self.layout.buckets)
        raise InputError(
            f"no bucket for a {kind} of {batch} requests with {rows} rows; compiled: {have}: "
            "compile with --batch and --verify-rows for it"
        )

    def _check_device(self) -> None:
        manifest = self.bundle.manifest
        target = get_target(manifest.target)
        major, minor = torch.cuda.get_device_capability(self.device)
        name = torch.cuda.get_device_name(self.device)
        arch = f"sm_{major}{minor}a"
        if arch != target.arch:
            raise InputError(
                f"{self.bundle.directory} was compiled for {target.arch} and this GPU "
                f"({name}) is {arch}: compile with --target {arch}"
            )
        have, need = sm_count(self.device), target.sm_count * len(self.mode.mine)
        if have < need:
            raise InputError(
                f"{self.bundle.directory} needs {need} SMs ({target.sm_count} a rank) and this GPU "
                f"({name}) has {have}: compile with --target {target.arch}:N for fewer SMs a rank"
            )
        free = torch.cuda.mem_get_info(self.device)[0]
        need = self.layout.total * len(self.mode.mine) + MARGIN
        if need > free:
            parts = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in self.layout.parts().items())
            raise InputError(
                f"{self.bundle.directory} needs {need / 1e9:.2f} GB of GPU memory and "
                f"{free / 1e9:.2f} GB are free (GB a rank: {parts}): use more ranks, smaller "
                "batches or a shorter --max-context"
            )


def _silent(name: str, done: int, total: int) -> None:
    """Progress that nobody wants to see."""
