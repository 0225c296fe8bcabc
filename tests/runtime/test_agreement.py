"""Ranks that differ, fail, hang, get killed or never come, as real processes on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from k3fuse.errors import InputError, K3FuseError, PeerFailedError
from k3fuse.runtime import board
from k3fuse.runtime.agreement import Group, disagreement

LIMIT = 1.5  # seconds
SOON = 3 * LIMIT  # by when all ranks have ended, with what starting them takes
WORLD = 3

Body = Callable[[Group], None]


class End(NamedTuple):
    """How a process ended: its exit code (-9: killed), and what it wrote to stderr of ours."""

    code: int | None
    said: str


def run(tmp_path: Path, body: Body, ranks: tuple[int, ...] = (0, 1, 2)) -> list[End]:
    """Run `body` in one process a rank; one that has not ended SOON fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "k3fuse.runtime.agreement"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [tmp_path / f"{rank}.err" for rank in ranks]
    processes = [
        context.Process(target=rank_main, args=(body, rank, port, log))
        for rank, log in zip(ranks, logs, strict=True)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + SOON + 10.0  # the first test starts the server of the forks
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in zip(ranks, processes, strict=True) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} hang; {[log.read_text() for log in logs]}"
    lines = [log.read_text().splitlines() for log in logs]
    said = ["\n".join(line for line in text if line.startswith("k3fuse: ")) for text in lines]
    return [End(process.exitcode, text) for process, text in zip(processes, said, strict=True)]


def rank_main(body: Body, rank: int, port: str, log: Path) -> None:
    """A process of one rank: what the command line makes of errors, with stderr in a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    began = time.monotonic()
    try:
        with Group.from_environment(WORLD, limit=LIMIT, environment=environment) as group:
            body(group)
    except K3FuseError as error:
        os.write(2, f"k3fuse: {type(error).__name__}: {error}\n".encode())
        sys.exit(error.exit_code)
    finally:
        os.write(2, f"ended after {time.monotonic() - began:.1f} s\n".encode())


def kill(number: signal.Signals = signal.SIGKILL) -> None:
    time.sleep(0.3)  # so that the stage has been said
    os.kill(os.getpid(), number)


def equal(group: Group) -> None:
    for step in range(3):
        told = group.agree("plan", {"plan": "a1"}, {"free": f"{group.rank}{step}"})
        assert [facts["free"] for facts in told] == [f"0{step}", f"1{step}", f"2{step}"]
        with group.stage("load weights"):
            pass


def test_equal_facts_pass_and_tell(tmp_path: Path) -> None:
    assert run(tmp_path, equal) == [End(0, "")] * WORLD


def slow(group: Group) -> None:
    with group.stage("load weights"), group.watch():
        time.sleep(1.3 * LIMIT if group.rank == 1 else 0)
    if group.rank == 2:
        time.sleep(1.3 * LIMIT)  # the others have ended, and rank 0 keeps the store for it


def test_slow_ranks_are_waited_for_and_ended_ranks_are_not_lost(tmp_path: Path) -> None:
    assert run(tmp_path, slow) == [End(0, "")] * WORLD


def differs(group: Group) -> None:
    group.agree("plan", {"architecture": "sm_90a", "plan": "b2" if group.rank == 1 else "a1"})


def test_other_facts_end_all_ranks_with_one_message(tmp_path: Path) -> None:
    first, *others = run(tmp_path, differs)
    assert first.code == 2
    assert first.said.startswith(
        "k3fuse: InputError: ranks disagree in stage 'plan': "
        "plan is a1 on rank 0, 2 and b2 on rank 1: "
    )
    assert others == [first, first]


def other_order(group: Group) -> None:
    group.agree("capture" if group.rank == 2 else "plan", {})


def test_other_stages_end_all_ranks(tmp_path: Path) -> None:
    first, *others = run(tmp_path, other_order)
    assert "stage is plan on rank 0, 1 and capture on rank 2" in first.said
    assert others == [first, first]


def raises(group: Group) -> None:
    group.agree("plan", {})
    with group.stage("load weights"):
        if group.rank == 1:
            raise MemoryError("7 GB wanted")
        if group.rank == 2:
            time.sleep(60)  # in the midst of it; rank 0 waits at the end


def test_a_rank_that_fails_in_a_stage_ends_all(tmp_path: Path) -> None:
    first, failing, third = run(tmp_path, raises)
    assert first == third
    assert first == End(
        1,
        "k3fuse: PeerFailedError: rank 1 failed in stage 'load weights': MemoryError: 7 GB wanted",
    )
    assert failing.code == 1
    assert "MemoryError: 7 GB wanted" in (tmp_path / "1.err").read_text()


def between(group: Group) -> None:
    group.agree("plan", {})
    if group.rank == 1:
        raise InputError("--prompt-ids is empty")
    with group.stage("capture"):
        time.sleep(60)


def test_a_rank_that_fails_between_stages_ends_all(tmp_path: Path) -> None:
    first, failing, third = run(tmp_path, between)
    assert first == third
    assert first.said.endswith("rank 1 failed between stages: --prompt-ids is empty")
    assert failing == End(2, "k3fuse: InputError: --prompt-ids is empty")


def killed(group: Group) -> None:
    with group.stage("load weights"):
        if group.rank == 1:
            kill()
        time.sleep(60 if group.rank == 2 else 0)


def test_a_rank_killed_in_a_stage_ends_all(tmp_path: Path) -> None:
    first, lost, third = run(tmp_path, killed)
    assert lost.code == -signal.SIGKILL
    assert first == third
    assert first == End(
        1,
        "k3fuse: PeerFailedError: rank 1 (last in stage 'load weights') was lost: no sign of life "
        f"for {LIMIT} s",
    )


def blocked(group: Group) -> None:
    group.agree("plan", {})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})  # as in a driver that never returns
    with group.stage("capture"):
        if group.rank == 1:
            time.sleep(0.3)  # until all are in it
            raise InputError("no cubin")
        time.sleep(60)


def test_a_blocked_stage_ends_with_its_process(tmp_path: Path) -> None:
    first, failing, third = run(tmp_path, blocked)
    assert failing.code == 2
    assert (first.code, third) == (1, first)
    assert "rank 1 failed in stage 'capture': no cubin; this rank's stage was" in first.said


def decode(group: Group, lost: int, number: signal.Signals = signal.SIGKILL) -> None:
    group.agree("plan", {})
    with group.stage("decode"), group.watch():
        if group.rank == lost:
            kill(number)
        time.sleep(60)


def decode_loses_2(group: Group) -> None:
    decode(group, 2)


def decode_loses_0(group: Group) -> None:
    decode(group, 0)


def decode_stops_0(group: Group) -> None:
    if group.rank == 0:
        subprocess.Popen(["sh", "-c", f"sleep {2 * LIMIT + 1}; kill -9 {os.getpid()}"])
    decode(group, 0, signal.SIGSTOP)


def test_a_rank_killed_in_decode_ends_all(tmp_path: Path) -> None:
    first, second, lost = run(tmp_path, decode_loses_2)
    assert lost.code == -signal.SIGKILL
    assert first == second
    assert first == End(
        1, "k3fuse: rank 2 (last in stage 'decode') was lost: no sign of life for 1.5 s"
    )


def test_rank_0_killed_with_the_store_ends_all(tmp_path: Path) -> None:
    lost, second, third = run(tmp_path, decode_loses_0)
    assert lost.code == -signal.SIGKILL
    for end in (second, third):
        assert end.code == 1
        assert "rank 0 at 127.0.0.1:" in end.said
        assert "was lost: the store is gone" in end.said


def test_rank_0_stopped_with_the_store_ends_all(tmp_path: Path) -> None:
    """As when the machine of rank 0 goes off the net: whoever asks the store waits for ever."""
    _, second, third = run(tmp_path, decode_stops_0)
    for end in (second, third):
        assert end.code == 1
        assert "was lost: the store has not answered for 1.5 s" in end.said


def own_report(group: Group) -> None:
    def broken(report: str) -> None:
        raise ValueError(f"cannot report: {report}")

    group.agree("plan", {})
    with group.stage("decode"), group.watch(broken):
        if group.rank == 1:
            kill()
        time.sleep(60)


def test_a_report_that_fails_ends_the_process(tmp_path: Path) -> None:
    first, _, third = run(tmp_path, own_report)
    assert (first.code, third) == (1, first)
    assert "rank 1 (last in stage 'decode') was lost" in first.said
    assert "ValueError: cannot report" in (tmp_path / "0.err").read_text()


def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    first, second = run(tmp_path, equal, (0, 1))
    assert first == second
    assert first.code == 1
    assert "PeerFailedError: rank 2 (not started)" in first.said


def comes_late(group: Group) -> None:
    group.agree("plan", {})
    if group.rank == 2:
        time.sleep(1.5 * LIMIT)
    group.agree("weights", {})


def test_a_rank_that_does_not_come_to_a_stage(tmp_path: Path) -> None:
    first, *others = run(tmp_path, comes_late)
    assert others == [first, first]
    assert first == End(
        1,
        "k3fuse: PeerFailedError: rank 2 (last in stage 'plan') did not get through stage "
        "'weights' within 1.5 s",
    )


def test_rank_0_never_starts(tmp_path: Path) -> None:
    (end,) = run(tmp_path, equal, (1,))
    assert end.code == 1
    assert "rank 0 at 127.0.0.1:" in end.said
    assert "does not answer" in end.said


GOOD = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"RANK": ""}, "RANK is not set: start one process a GPU, for example with torchrun"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', not a number"),
        ({"RANK": "4"}, "RANK is 4: ranks of WORLD_SIZE 4 are 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1', not a number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, the bundle was compiled for 4 ranks: start 4"),
    ],
)
def test_a_wrong_environment_is_named(change: Mapping[str, str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Group.from_environment(4, environment={**GOOD, **change})


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"MASTER_PORT {port}: rank 0 cannot listen there"):
            Group.from_environment(4, environment={**GOOD, "MASTER_PORT": port})


def test_one_rank_agrees_with_itself() -> None:
    with Group.from_environment(1, environment={"RANK": "0", "WORLD_SIZE": "1"}) as group:
        assert (group.rank, group.world) == (0, 1)
        assert group.agree("plan", {"plan": "a1"}, {"free": "1"}) == [{"free": "1"}]
        with pytest.raises(ValueError, match="mine"), group.stage("decode"), group.watch():
            raise ValueError("mine")


def test_all_differences_are_named() -> None:
    brought = [
        {"stage": "plan", "plan": "a", "driver": "580"},
        {"stage": "plan", "plan": "b", "driver": "580"},
        {"stage": "plan", "plan": "a"},
    ]
    assert (
        "plan is a on rank 0, 2 and b on rank 1; driver is 580 on rank 0, 1 and missing on rank 2"
        in (disagreement(brought))
    )
    assert disagreement(brought[:1] * 3) == ""


def test_time_in_which_this_process_stood_still_hardly_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(board.time, "monotonic", lambda: now)
    silence = board.Silence(5.0)
    silence.look(1)
    now = 1000.0  # a suspended machine: the peer stood still as well
    silence.look(1)
    assert silence.seconds == 5.0
    now = 1004.0
    silence.look(1)
    assert silence.seconds == 9.0
    silence.look(2)
    assert silence.seconds == 0.0


def test_a_name_that_the_store_knows_is_refused() -> None:
    store = HashStore()
    verdicts: list[str] = []
    for name in ("k3fuse/0", "k3fuse/1", "k3fuse/0"):
        one = board.Board(0, 1, limit=LIMIT, keeper="rank 0")
        one.start(store, name, lambda verdict: None)
        one.meet({}, {}, LIMIT)
        one.close()
        verdicts.append(one.verdict)
    assert verdicts[:2] == ["", ""]
    assert "has a group named 'k3fuse/0' already" in verdicts[2]


def test_errors_of_peers_exit_with_1() -> None:
    assert PeerFailedError("rank 1 was lost").exit_code == 1


def test_of_two_verdicts_one_is_everybodys() -> None:
    """Each of two ranks finds a fault of its own in the same moment."""
    store = HashStore()
    boards = [board.Board(rank, 2, limit=LIMIT, keeper="rank 0") for rank in range(2)]
    for one in boards:
        one.start(store, "twins", lambda verdict: None)
    fails = [
        threading.Thread(target=one.fail, args=(f"rank {rank} says so",))
        for rank, one in enumerate(boards)
    ]
    for thread in fails:
        thread.start()
    for thread in fails:
        thread.join()
    assert boards[0].verdict == boards[1].verdict
    assert boards[0].verdict in ("rank 0 says so", "rank 1 says so")
    for one in boards:
        one.close()
