"""What a rank allocates: nothing overlaps, sizes are the plans', every argument has an address."""

from __future__ import annotations

from itertools import pairwise

import pytest

from k3fuse.errors import InputError
from k3fuse.runtime.gpu.memory import allocate
from k3fuse.runtime.gpu.ranks import Loopback, VirtualRanks
from k3fuse.tensor_type import DType
from tests.runtime.gpu.conftest import CPU, made


def test_places_do_not_overlap_and_are_aligned() -> None:
    layout = made().layout
    for places, size in (
        (layout.weights, layout.weight_bytes),
        (layout.states, layout.state_bytes),
    ):
        spans = sorted((p.offset, p.offset + p.bytes) for p in places.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert spans[-1][1] <= size
        assert all(start % 256 == 0 for start, _ in spans)


def test_every_bucket_has_rings_of_its_own() -> None:
    layout = made().layout
    rings = [r for b in layout.buckets.values() for r in b.rings.values()]
    spans = sorted((r.offset, r.offset + r.bytes) for r in rings)
    assert len(rings) == sum(len(b.plan.mailboxes) for b in layout.buckets.values())
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= layout.ring_bytes


def test_the_total_is_what_the_plans_predict() -> None:
    found = made()
    layout = found.layout
    plans = [b.plan for b in found.buckets]
    # Padding to 256 bytes counts at this size; at full size it is nothing.
    predicted = max(p.memory.weights + p.memory.state for p in plans)
    assert predicted <= layout.weight_bytes + layout.state_bytes < 1.05 * predicted
    assert layout.arena_bytes == max(p.memory.arena for p in plans)
    assert layout.ring_bytes >= sum(p.memory.mailboxes for p in plans)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_argument_lies_in_the_memory_of_its_rank(tp: int) -> None:
    layout = made(tp=tp).layout
    memories = allocate(layout, VirtualRanks(tp), CPU)
    for rank, memory in memories.items():
        for bucket, held in memory.buckets.items():
            found = layout.buckets[bucket]
            for launch, item in zip(found.plan.launches, found.selection.launches, strict=True):
                values = held.arguments(item, launch.stream)
                assert set(values) == {a.parameter for a in item.arguments}
                for argument in item.arguments:
                    if argument.role == "rank":
                        assert values[argument.parameter] == rank
                    elif argument.role in ("use", "launch"):
                        assert values[argument.parameter] == argument.use
                    else:
                        assert values[argument.parameter] > 0


def test_outputs_lie_in_the_arena_and_have_their_global_types() -> None:
    layout = made().layout
    for bucket in layout.buckets.values():
        rows = bucket.plan.rows
        assert set(bucket.outputs) == set(bucket.output_types) == {"logits", "tokens", "hidden"}
        assert bucket.outputs["logits"].shape == (rows, 256)  # half of the vocabulary
        assert str(bucket.output_types["logits"]) == "f32[M,512]@S(1)"
        for place in bucket.outputs.values():
            assert place.offset + place.bytes <= layout.arena_bytes


def test_states_of_slots_are_known_from_those_of_pages() -> None:
    layout = made().layout
    assert {name.rpartition(".")[2] for name in layout.slotted} == {"conv", "recurrent"}
    assert set(layout.states) - set(layout.slotted) == {"state.3.cache", "state.7.cache"}


def test_mailboxes_start_empty() -> None:
    layout = made().layout
    memory = allocate(layout, VirtualRanks(2), CPU)[0]
    for bucket in layout.buckets.values():
        for ring in bucket.rings.values():
            start = memory.ring(ring) - memory.ring(next(iter(bucket.rings.values())))
            assert start % 256 == 0
            words = memory._rings[ring.offset : ring.offset + ring.bytes]  # pyright: ignore[reportPrivateUsage]
            if ring.mailbox.sentinel == "minus_one":
                assert bool((words == 0xFF).all())
            else:
                typed = words.view(ring.dtype.to_torch())
                assert bool((typed == 0).all())
                assert bool(typed.signbit().all())


def test_a_loopback_rank_sends_to_the_slots_of_its_peers() -> None:
    """What rank 1 of 4 stores in its slot of peer p's mailbox lands in slot p of its own."""
    layout = made(tp=4, batches=(2,)).layout
    mode = Loopback(4, rank=1)
    memory = allocate(layout, mode, CPU)[1]
    (bucket,) = layout.buckets.values()
    for ring in bucket.rings.values():
        own = memory.ring(ring)
        for peer, address in enumerate(mode.peers(1, ring)):
            assert address + 1 * ring.slot == own + peer * ring.slot
        if ring.mailbox.protocol == "push_partial":
            assert 4 * ring.slot <= ring.mailbox.stage_bytes
        if ring.mailbox.protocol == "push_gather":
            assert ring.slot % ring.dtype.itemsize == 0


def test_step_inputs_lie_in_one_buffer() -> None:
    layout = made().layout
    for bucket in layout.buckets.values():
        assert set(bucket.inputs) == {
            *("step", "inputs.tokens", "inputs.lengths", "inputs.block_table", "inputs.slots")
        }
        assert bucket.inputs["step"].dtype == DType.I64
        ends = [p.offset + p.bytes for p in bucket.inputs.values()]
        assert max(ends) <= bucket.input_bytes


def test_a_loopback_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(InputError, match="--loopback-rank 4: the group has ranks 0 to 3"):
        Loopback(4, rank=4)
