"""What every stage of a kernel works with: values and where they are, mailboxes, barriers.

A stage is a factory `make(ctx, number)` called before tracing; it returns functions that trace.
Those capture the context, whose attributes are set when tracing starts: the DSL lets a traced
function read attributes of a captured object inside run-time loops, but not closed-over values.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.launch import LaunchConfig
from k3fuse.kernels.program import ITEMSIZE
from k3fuse.kernels.stages import PUSHES

EMPTY = 0x80000000  # a float32 -0.0: the pattern of a mailbox word that has not arrived
DEBUG_SPINS = 1 << 22
SLOT_WORDS = 32  # registers that hold terms on their way, of a thread


class Context:
    """thread, warp, lane, cta: where this thread is; threads, workers and ctas are Python numbers.

    workers: threads of a CTA without those that only ask for weights.
    """

    def __init__(self, config: LaunchConfig):
        self.config = config
        self.program = config.program
        self.threads = config.threads
        self.workers = config.threads - config.askers
        self.ctas = config.ctas
        self.warps = config.threads // 32
        self.tp = config.program.tp
        self.debug = config.debug
        self.rings = make_rings(self)
        self.sync_workers = make_sync_workers(self)
        self.grid_barrier = make_grid_barrier(self)
        self.push_to_all = make_push_to_all(self)

    def start(self, pointers, numbers):
        """Called first when tracing: pointers and numbers in the order of the parameters."""
        names = [p.name for p in self.config.parameters]
        given = dict(zip(names, [*pointers, *numbers], strict=True))
        self.given = given
        self.thread = cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.cta = cute.arch.block_idx()[0]
        self.shared = ins.shared_base()

    def held(self, value):
        """The `Held` of a value."""
        return self.program.values[value]

    def address(self, value):
        """First byte of a value in the rank's memory (not of a mailbox)."""
        held = self.held(value)
        offset = self.config.scratch_offset(value)
        if offset is not None:
            return self.given["scratch"] + offset
        return self.given[f"v{held.root}"]

    def near(self, value):
        """First byte of a value and the kind of load: of the CTA's own copy if there is one."""
        kept = self.config.private_offset(value)
        if kept is not None:
            return self.shared + kept, "shared"
        return self.address(value), "global.cg"

    def stage_of(self, value):
        """First byte of the stage of the rank's mailbox that holds a value. After `open_rings`."""
        return self.given[f"v{value}"] + self.stage_offsets[value]

    def open_rings(self):
        """Behind the wait: find this step's stages, re-arm, publish the peers' addresses."""
        if self.config.rings:
            self.stage_offsets, self.uses = {}, {}
            # Before the step is waited for.
            peers = [self.rings.ask_peer(self.given[f"v{value}"]) for value in self.config.pushed]
            step = cute.arch.load(cute.recast_ptr(self.given["step"], dtype=Int64), Int64)
            for value in self.config.rings:
                ring = self.held(value).ring
                use = step * ring.uses + Int64(self.given[f"use{value}"])
                self.uses[value] = use
                self.stage_offsets[value] = (use % ring.stages) * ring.stage_bytes
                if ring.first_reader:
                    self.rings.rearm(
                        self.given[f"v{value}"]
                        + ((use + ring.rearm) % ring.stages) * ring.stage_bytes,
                        ring.stage_bytes // 16,
                        empty_word(self.held(value).dtype),
                    )
            for value, peer in zip(self.config.pushed, peers, strict=True):
                self.rings.note_peers(
                    peer,
                    self.stage_offsets[value],
                    self.shared + self.config.peers_offset(value),
                )
            if self.config.pushed:
                self.sync_workers()

    # -- values at a point: `width` neighbouring columns of a row ------------------------------
    def load(self, value, row, column, width, how="global.cg"):
        """Elements of a value in memory or in the own mailbox, as float32."""
        held = self.held(value)
        size = ITEMSIZE[held.dtype]
        at = (row * held.width + column) * size
        if held.place == "mailbox":
            place = self.stage_of(value) + at
            words = ins.load_words(place, width * size, "volatile.global")
            words = self.arrived(words, place, value, width * size)
        else:
            words = ins.load_words(self.address(value) + at, width * size, how)
        return unpack(words, held.dtype, width)

    def arrived(self, words, place, value, count):
        """`words` as first seen at `place`, waited for."""
        kind = kind_of(self.held(value).dtype, count)
        return self.rings.settle[count, kind](words, place, value)

    def all_arrived(self, places, value, count):
        """Words at several places of the own mailbox, `count` bytes each: one wait for all."""
        words = [ins.load_words(place, count, "volatile.global") for place in places]
        kind = kind_of(self.held(value).dtype, count)
        return self.rings.settle_all[count, kind](words, places, value)

    def sum_slots(self, value, row, column, width):
        """The sum over the ranks' terms of a [T, M, N] mailbox, in rank order, as float32."""
        held = self.held(value)
        slots, rows, columns = held.shape[0], held.shape[1], held.width // held.shape[1]
        size = ITEMSIZE[held.dtype]
        first = self.stage_of(value) + (row * columns + column) * size
        add_up = self.rings.sum_slots[width, held.dtype]
        return add_up(first, rows * columns * size, slots, value)

    def sink(self, value, row, column, values, live=None, spread=None):
        """Store elements of a result where it is wanted: in memory, and at the peers.

        live: Boolean, whether this thread's elements exist (None: always). spread: as in `push`.
        """
        held = self.held(value)
        width, size = len(values), ITEMSIZE[held.dtype]
        words = pack(values, held.dtype)
        if self.config.in_memory(value):
            at = (row * held.width + column) * size
            ins.store_words(self.address(value) + at, words, width * size, predicate=live)
        for step in self.program.consumers(value):
            if step.op in PUSHES:
                self.push(step, row, column, words, width, live, spread)

    def push(self, step, row, column, words, width, live=None, spread=None):
        """Send elements of a step's operand, as words, to the peers' mailboxes.

        spread: (which, exists) when eight groups of lanes hold the same elements: number `which`
        sends them to every eighth peer.
        """
        (target,) = step.results
        held = self.held(step.operands[0])
        size, count = ITEMSIZE[held.dtype], width * ITEMSIZE[held.dtype]
        words = never_empty(words, held.dtype, count)
        rank = Int32(self.given["rank"])
        peers = self.shared + self.config.peers_offset(target)
        if step.op == "push_chunks":
            chunk = held.width // self.tp
            owner = column // chunk
            at = ((rank * held.rows + row) * chunk + (column - owner * chunk)) * size
            base = ins.load_shared8(peers + owner * 8)
            ins.store_words(base + Int64(at), words, count, "volatile.global", live)
            return
        if step.op == "push_partial":
            at = ((rank * held.rows + row) * held.width + column) * size
        else:
            at = (row * (held.width * self.tp) + rank * held.width + column) * size
        # A constant predicate would fold to an immediate, which PTX does not take.
        alive = ins.opaque(1) != 0 if live is None else live
        if spread is None:
            self.push_to_all[count](peers, Int64(at), words, alive, Int32(0), 1)
        else:
            self.push_to_all[count](peers, Int64(at), words, spread[1], spread[0], 8)


def empty_word(dtype):
    """The word of a mailbox that has not arrived."""
    return {"f32": 0x80000000, "bf16": 0x80008000, "i64": 0xFFFFFFFF, "i32": 0xFFFFFFFF}[dtype]


def kind_of(dtype, count):
    """How emptiness shows in the words of an access of `count` bytes."""
    return "half" if dtype == "bf16" and count == 2 else dtype


def is_empty(words, kind):
    """Whether any element of the words is the empty pattern."""
    found = Boolean(False)
    for word in words:
        if kind == "f32":
            found = found | (word == Uint32(EMPTY))
        elif kind == "half":
            found = found | (word == Uint32(0x8000))
        elif kind == "bf16":
            found = found | ((word << Uint32(16)) == Uint32(EMPTY))
            found = found | ((word & Uint32(0xFFFF0000)) == Uint32(EMPTY))
        else:
            found = found | (word == Uint32(0xFFFFFFFF))
    return found


def never_empty(words, dtype, count):
    """The same elements with -0.0 as +0.0."""
    kind = kind_of(dtype, count)
    if kind == "f32":
        return [cutlass.select_(w == Uint32(EMPTY), Uint32(0), w) for w in words]
    if kind == "half":
        return [cutlass.select_(w == Uint32(0x8000), Uint32(0), w) for w in words]
    if kind == "bf16":
        low = [
            cutlass.select_((w << Uint32(16)) == Uint32(EMPTY), w & Uint32(0xFFFF0000), w)
            for w in words
        ]
        return [
            cutlass.select_((w & Uint32(0xFFFF0000)) == Uint32(EMPTY), w & Uint32(0xFFFF), w)
            for w in low
        ]
    return words


def unpack(words, dtype, width):
    """Words of an access as float32 values."""
    if dtype == "bf16":
        values = [value for word in words for value in ins.unpack_bf16(word)]
        return values[:width]
    if dtype == "f32":
        return [ins.as_float(word) for word in words]
    raise ValueError(f"{dtype} is not read as numbers")


def pack(values, dtype):
    """Float32 values as the words of an access of that type."""
    if dtype == "f32":
        return [ins.as_word(value) for value in values]
    if dtype != "bf16":
        raise ValueError(f"{dtype} is not written as numbers")
    if len(values) == 1:
        return [ins.pack_bf16(values[0], Float32(0.0))]
    return [ins.pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]


class make_rings:  # noqa: N801 (a factory, like the stages)
    """Traced helpers for mailboxes."""

    def __init__(self, ctx):
        workers, ctas, tp = ctx.workers, ctx.ctas, ctx.tp

        @cute.jit
        def rearm(stage: cute.Pointer, pieces: cutlass.Constexpr, word: cutlass.Constexpr):
            if ctx.thread < workers:
                first = ctx.cta * workers + ctx.thread
                for i in cutlass.range(first, pieces, ctas * workers, unroll=1):
                    ins.store_words(stage + i * 16, [Uint32(word)] * 4, 16)

        def ask_peer(table):
            """Address of this thread's peer; past the peers, of the last."""
            peer = cutlass.min(ctx.thread, Int32(tp - 1))
            return cute.arch.load(cute.recast_ptr(table, dtype=Int64) + peer, Int64)

        @cute.jit
        def note_peers(base: Int64, offset: Int64, peers: Int32):
            if ctx.thread < tp:
                ins.store_shared8(peers + ctx.thread * 8, base + offset)

        def make_settle(count, kind):
            @cute.jit
            def settle(words: list, place: cute.Pointer, value: cutlass.Constexpr):
                empty = is_empty(words, kind)
                tries = Int32(0)
                while empty:
                    words = ins.load_words(place, count, "volatile.global")
                    empty = is_empty(words, kind)
                    if cutlass.const_expr(ctx.debug):
                        tries += 1
                        empty = empty & (tries < DEBUG_SPINS)
                if cutlass.const_expr(ctx.debug):
                    report(tries, words[0], value)
                return words

            return settle

        def make_settle_all(count, kind):
            def any_empty(words):
                return is_empty([word for piece in words for word in piece], kind)

            @cute.jit
            def settle_all(words: list, places: list, value: cutlass.Constexpr):
                empty = any_empty(words)
                tries = Int32(0)
                while empty:
                    words = [ins.load_words(p, count, "volatile.global") for p in places]
                    empty = any_empty(words)
                    if cutlass.const_expr(ctx.debug):
                        tries += 1
                        empty = empty & (tries < DEBUG_SPINS)
                if cutlass.const_expr(ctx.debug):
                    report(tries, words[0][0], value)
                return words

            return settle_all

        @cute.jit
        def report(tries: Int32, seen: Uint32, value: cutlass.Constexpr):
            """A spin that was given up, into the error record: a count, then of the first one the
            rank, launch, CTA, thread, mailbox (value of the program), use wanted, word seen."""
            if tries >= DEBUG_SPINS:
                record = cute.recast_ptr(ctx.given["errors"], dtype=Uint32)
                before = cute.arch.atomic_add(record, Uint32(1), sem="relaxed", scope="gpu")
                if before == Uint32(0):
                    place = [ctx.given["rank"], ctx.given["launch"], ctx.cta, ctx.thread]
                    ins.store_words(ctx.given["errors"] + 16, [Uint32(w) for w in place], 16)
                    what = [Uint32(value), Uint32(ctx.uses[value]), seen, Uint32(0)]
                    ins.store_words(ctx.given["errors"] + 32, what, 16)

        def make_sum(width, dtype):
            count = width * ITEMSIZE[dtype]
            arrived = self.settle[count, kind_of(dtype, count)]
            batch = max(1, SLOT_WORDS // width)

            def add(total, first, slot_bytes, slots, value):
                places = [first + s * slot_bytes for s in range(slots)]
                seen = [ins.load_words(p, count, "volatile.global") for p in places]
                for words, place in zip(seen, places, strict=True):
                    terms = unpack(arrived(words, place, value), dtype, width)
                    total = [a + b for a, b in zip(total, terms, strict=True)]
                return total

            @cute.jit
            def sum_slots(
                first: cute.Pointer,
                slot_bytes: cutlass.Constexpr,
                slots: cutlass.Constexpr,
                value: cutlass.Constexpr,
            ):
                # From +0.0, so that terms of -0.0 add up to +0.0.
                total = [Float32(0.0) for _ in range(width)]
                for b in cutlass.range(slots // batch, unroll=1):
                    total = add(total, first + b * (batch * slot_bytes), slot_bytes, batch, value)
                rest = slots % batch
                if cutlass.const_expr(rest > 0):
                    total = add(total, first + (slots - rest) * slot_bytes, slot_bytes, rest, value)
                return total

            return sum_slots

        self.rearm, self.ask_peer, self.note_peers = rearm, ask_peer, note_peers
        kinds = (("f32", (4, 8, 16, 32)), ("bf16", (4, 8, 16, 32)), ("half", (2,)), ("i64", (8,)))
        self.settle = {(n, kind): make_settle(n, kind) for kind, sizes in kinds for n in sizes}
        self.settle_all = {
            (n, k): make_settle_all(n, k) for n, k in ((4, "f32"), (16, "f32"), (16, "bf16"))
        }
        self.sum_slots = {(w, d): make_sum(w, d) for w in (1, 2, 4, 8) for d in ("bf16", "f32")}


WORKERS = 14  # named barrier


def make_sync_workers(ctx):
    """All threads of the CTA meet, but those that only ask for weights."""

    @cute.jit
    def sync_workers():
        if cutlass.const_expr(ctx.workers == ctx.threads):
            cute.arch.sync_threads()
        else:
            if ctx.thread < ctx.workers:
                ins.barrier(WORKERS, ctx.workers)

    return sync_workers


def make_grid_barrier(ctx):
    """All CTAs arrive before any goes on, and what they wrote is visible; the grid is resident."""

    @cute.jit
    def grid_barrier():
        cute.arch.sync_threads()
        if ctx.thread == 0:
            old = arrive(ctx, 0)
            turned = turned_since(ctx, 0, old)
            while turned == Uint32(0):
                turned = turned_since(ctx, 0, old)
        cute.arch.sync_threads()

    return grid_barrier


def counter_of(ctx, number):
    """A counter of the grid. Each time all CTAs have arrived its top bit turns."""
    return cute.recast_ptr(ctx.given["control"], dtype=Uint32) + number


def arrive(ctx, number):
    """Arrive at a counter, once a CTA; the word that was there. (A count of arrivals would be lost
    when the word overflows.)"""
    last = Uint32(0x80000000 - (ctx.ctas - 1))
    step = cutlass.select_(ctx.cta == 0, last, Uint32(1))
    return cute.arch.atomic_add(counter_of(ctx, number), Uint32(step), sem="acq_rel", scope="gpu")


def turned_since(ctx, number, old):
    """Nonzero when all CTAs have arrived, this one where the word was `old`."""
    seen = cute.arch.load(counter_of(ctx, number), Uint32, sem="acquire", scope="gpu")
    return (seen ^ old) & Uint32(0x80000000)


def make_push_to_all(ctx):
    """By bytes of an access: store words at one offset of every peer's stage."""

    def make(count):
        @cute.jit
        def push_to_all(
            peers: Int32,
            at: Int64,
            words: list,
            live: Boolean,
            first: Int32,
            stride: cutlass.Constexpr,
        ):
            for peer in cutlass.range(first, ctx.tp, stride, unroll=4):
                base = ins.load_shared8(peers + peer * 8)
                ins.store_words(base + at, words, count, "volatile.global", live)

        return push_to_all

    return {count: make(count) for count in (2, 4, 8, 16, 32)}
