"""A rank that does not come to a checked call is named on every rank that did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data_cases import Caught, caught, checked_mode, integers, shard_of
from ranks import own_group, pool

import lmhead
from lmhead import arrivals
from lmhead.arrivals import SETTLE_S, Arrivals, words
from lmhead.comm import Call, Comm

CPU = torch.device("cpu")
VOCAB, WIDTH, TIMEOUT_S = 10, 8, 3.0
# Who returns early, by scenario; all scenarios wait for their timeouts at the same time.
ABSENT = {
    "head": [2],
    "sample": [2],
    "exchange": [2],
    "sample_exchange": [1],
    "share": [3],
    "head of a layout, shared": [0],
    "operator": [2],
    "two": [1, 3],
    "no store": [2],
    "broken store": [2],
    "waiting": [2],
    "waiting for two": [0, 1],
    "constructor": [3],
}


class BrokenStore:
    """A store whose server is gone."""

    def add(self, key: str, value: int) -> int:
        raise dist.DistNetworkError("the server is gone")


@contextmanager
def _stores(strange: dict[str, Any]) -> Iterator[None]:
    """Groups, by name, whose store is another one, or an error."""
    plain = dist.ProcessGroup.get_group_store

    def get(group: dist.ProcessGroup) -> Any:
        found = strange.get(group.group_name)
        if isinstance(found, Exception):
            raise found
        return plain(group) if found is None else found

    with mock.patch.object(dist.ProcessGroup, "get_group_store", get):
        yield


@contextmanager
def _backend_that_does_not_raise(*names: str) -> Iterator[None]:
    """Groups, by name, that are taken for NCCL's."""
    with mock.patch.object(Comm, "raises", property(lambda comm: comm.name not in names)):
        yield


def _calls(
    rank: int, ranks: int, groups: dict[str, dist.ProcessGroup]
) -> dict[str, Callable[[], object]]:
    """The call of each scenario, made ready so far as that needs all ranks."""
    weight = integers(VOCAB, WIDTH, seed=1)
    shard, hidden = shard_of(weight, ranks, rank), integers(2, WIDTH, seed=rank)
    partial = integers(2 * ranks, WIDTH, seed=9) @ shard.t()
    layout = lmhead.Layout.of(4, 2)

    def head(name: str, **options: Any) -> lmhead.LMHead:
        return lmhead.LMHead(shard, VOCAB, groups[name], **options)

    plain, drawn, mixed = head("head"), head("sample"), head("share", layout=layout)
    together = head("head of a layout, shared", layout=layout)
    several = {name: head(name) for name in ("two", "no store", "broken store")}
    with _backend_that_does_not_raise(*(groups[name].group_name for name in _waiting())):
        several |= {name: head(name) for name in _waiting()}
    sizes = (VOCAB, groups["operator"].group_name, ranks, 1.0, None, torch.float32, torch.float32)
    ids = torch.zeros(1, dtype=torch.int64)
    exchange, draw = lmhead.exchange, lmhead.sample_exchange
    return {
        "head": lambda: plain(hidden),
        "sample": lambda: drawn.sample(hidden, temperature=0.0),
        "exchange": lambda: exchange(partial, vocab_size=VOCAB, group=groups["exchange"]),
        "sample_exchange": lambda: draw(
            partial, vocab_size=VOCAB, group=groups["sample_exchange"], temperature=0.0
        ),
        "share": lambda: mixed.share(ids, [2, 2]),
        "head of a layout, shared": lambda: together.sample(hidden, temperature=0.0, share=True),
        "operator": lambda: torch.ops.lmhead.logits(hidden, shard, None, *sizes, None, "", ""),
        **{name: lambda name=name: several[name](hidden) for name in several},
        "constructor": lambda: head("constructor"),
    }


def _waiting() -> list[str]:
    return [name for name in ABSENT if name.startswith("waiting")]


def _early(rank: int, ranks: int) -> tuple[dict[str, Caught], dict[str, Any]]:
    """Every scenario in a thread of its own, so that one timeout passes for all of them."""
    checked_mode()
    groups = {name: own_group(timeout_s=TIMEOUT_S) for name in ABSENT}
    calls, found = _calls(rank, ranks, groups), {}
    names = {name: groups[name].group_name for name in ABSENT}
    strange = {
        names["no store"]: RuntimeError("no store here"),
        names["broken store"]: BrokenStore(),
    }

    def run(name: str) -> None:
        found[name] = caught(calls[name])

    threads = [
        threading.Thread(target=run, args=(name,))
        for name, absent in ABSENT.items()
        if rank not in absent
    ]
    with _stores(strange), _backend_that_does_not_raise(*(names[name] for name in _waiting())):
        dist.barrier()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()
        # The group of a call that was not launched is whole: a plain collective still runs on it.
        total = torch.ones(1)
        dist.all_reduce(total, group=groups["waiting"])
        # Who comes after all is not left alone in a collective, nor is a later call.
        after = {"total": total.item(), "late": caught(calls["waiting"]), "names": names}
        dist.barrier()
    return found, after


def test_ranks_that_returned_early_are_named_in_every_call() -> None:
    """On 4 ranks, with LMHEAD_CHECK=1: the numbers of those that did not come, in the text and in
    the record, on every rank that came.
    """
    answers = pool(4).run(_early)
    for rank, (found, after) in enumerate(answers):
        assert sorted(found) == sorted(name for name in ABSENT if rank not in ABSENT[name])
        for name, error in found.items():
            assert error.error == "CollectiveError", f"{name}: {error}"
            assert f"failed on rank {rank} of 4 (group '{after['names'][name]}'" in error.text
            assert error.record["group"] == after["names"][name] and error.record["rank"] == rank
            if name in ("no store", "broken store"):
                assert "did not arrive" not in error.text and "absent" not in error.record
                assert "skipped this call" in error.text and error.cause == "RuntimeError"
                continue
            assert error.record["absent"] == ABSENT[name], f"{name}: {error}"
            assert words(ABSENT[name], 0).removesuffix("0.0 s") in error.text, f"{name}: {error}"
            waits = name in _waiting()
            assert error.cause == ("TimeoutError" if waits else "RuntimeError")
            assert ("it was not launched" in error.text) == waits
        assert after["total"] == 4.0
        late = after["late"]
        assert late.error == "CollectiveError"
        assert "a rank has given up waiting for others" in late.text


def test_words() -> None:
    assert words([2], 6.04) == "rank 2 did not arrive within 6.0 s"
    assert words([2, 5, 63], 0.46) == "ranks 2, 5, 63 did not arrive within 0.5 s"


class _Counting:
    """A store that counts round trips."""

    def __init__(self, store: Any) -> None:
        self.store, self.trips = store, 0

    def add(self, key: str, value: int) -> int:
        self.trips += 1
        return self.store.add(key, value)

    def get(self, key: str) -> bytes:
        self.trips += 1
        return self.store.get(key)


def _good_calls(rank: int, ranks: int) -> dict[str, Any]:
    """Agreements in which every rank comes, on both kinds of backend."""
    group = own_group(timeout_s=60)
    comm, call = Comm(group), Call("check", (), 0, "", 1)
    store = _Counting(group.get_group_store())
    looks, sleep = [], arrivals.time.sleep

    def again(seconds: float) -> None:
        looks.append(seconds)
        sleep(seconds)

    with _stores({group.group_name: store}):
        for _ in range(5):
            comm.agree({"same": 1}, None, call, CPU)
        raising, store.trips = store.trips, 0
        comm.backend = "nccl, so to speak"  # its notes are apart from gloo's
        with mock.patch.object(arrivals.time, "sleep", again):
            for _ in range(5):
                comm.agree({"same": 1}, None, call, CPU)
    dist.destroy_process_group(group)
    return {"raising": raising, "waiting": store.trips - len(looks)}


def test_a_call_to_which_all_ranks_come_asks_the_store_once_or_until_they_have() -> None:
    """One round trip on gloo, whatever N; elsewhere two and a look at a time at ONE counter."""
    for ranks in (2, 4):
        for found in pool(ranks).run(_good_calls):
            assert found == {"raising": 5, "waiting": 5 * 3}


class _Local:
    """A store in this process, of as many keys as it is asked for."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, value: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + value
        return self.counts[key]

    def get(self, key: str) -> bytes:
        return str(self.counts[key]).encode()


class _Clock:
    """Time that passes while one sleeps, in which ranks come."""

    def __init__(self, store: _Local, coming: Sequence[int] = ()) -> None:
        self.store, self.coming, self.now = store, list(coming), 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.coming:
            _noted(self.store, self.coming.pop(0), 3)


def _noted(store: _Local, rank: int, ranks: int, timeout: float = 60.0) -> Arrivals:
    count = store.add(f"here/{rank}", 1)
    store.add("here/all", 1)
    return Arrivals(store, "here", ranks, count, timeout, since=100.0)


def test_keys_do_not_grow_with_calls_and_a_late_last_rank_ends_the_wait() -> None:
    store = _Local()
    for _ in range(50):
        notes = [_noted(store, rank, 3) for rank in range(3)]
        assert [note.wait() for note in notes] == [""] * 3
        assert notes[0].absent() == []
    assert len(store.counts) == 4
    first = _noted(store, 0, 3)
    assert first.absent() == [1, 2]
    with mock.patch.object(arrivals, "time", _Clock(store, [2, 1])):
        assert first.wait() == ""
    assert first.absent() == []


def test_who_gives_up_gives_up_for_all() -> None:
    store = _Local()
    first = _noted(store, 0, 3, timeout=2.0)
    with mock.patch.object(arrivals, "time", _Clock(store, [2])) as clock:
        assert first.wait() == "the group's timeout of 2 s is over"
        assert 2.0 < clock.now - 100.0 < 2.1 and first.absent() == [1]
        assert "has given up" in _noted(store, 1, 3).wait()
        assert "has given up" in _noted(store, 0, 3).wait()


def test_a_failure_at_once_gives_ranks_on_their_way_a_moment() -> None:
    store = _Local()
    note = _noted(store, 0, 3, timeout=60.0)
    with mock.patch.object(arrivals, "time", _Clock(store, [1])) as clock:
        assert note.settled() == [2]
        assert SETTLE_S <= clock.now - 100.0 < SETTLE_S + 0.1
    over = _noted(store, 0, 3, timeout=0.5)
    with mock.patch.object(arrivals, "time", _Clock(store)) as clock:
        assert over.settled() == [1, 2]
        assert clock.now - 100.0 < 0.6, "never past the group's timeout"
