# SPDX-License-Identifier: Apache-2.0
"""A script of torch.distributed that uses its store, on every host: `python -m tests.netns.store_program SETTINGS`.

It prints a JSON object a line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

import nicps.torch

THREADS, ADDS = 4, 10


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def refused(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """The error that it raises."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it was not refused")


def meet(store: Store, name: str) -> None:
    """A barrier over nothing but the store, as torch makes it."""
    if store.add(f"{name}/count", 1) == dist.get_world_size():
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def shares(store: Store) -> None:
    """Every call, also through a PrefixStore, from several threads, while sums are made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        assert store.num_keys() == 0
        store.set("begin", "")
        assert 1 <= store.num_keys() <= size  # the others go on from here
    store.wait(["begin"])
    store.set(f"of {rank}", bytes([rank, 255, 0]))
    assert [store.get(f"of {k}") for k in range(size)] == [bytes([k, 255, 0]) for k in range(size)]
    inner = PrefixStore("inner", store)
    with ThreadPoolExecutor(THREADS + 2) as pool:
        waits = pool.submit(inner.get, "late")
        sums = pool.submit(lambda: [dist.all_reduce(torch.ones(5000)) for _ in range(30)])
        adds = [
            pool.submit(lambda: [inner.add("n", 1) for _ in range(ADDS)]) for _ in range(THREADS)
        ]
        counted = [n for each in adds for n in each.result()]
        assert len(set(counted)) == len(counted) and not waits.done()
        meet(inner, "added")
        assert inner.add("n", 0) == size * THREADS * ADDS
        meet(store, "counted")
        if rank == size - 1:
            inner.set("late", "x" * 20_000)
        assert waits.result() == b"x" * 20_000
        sums.result()
    if rank == 0:
        assert inner.compare_set("swapped", "", "a") == b"a"
        assert inner.compare_set("swapped", "z", "b") == b"a"
        assert inner.compare_set("swapped", "a", "b") == b"b"
        inner.append("swapped", "c")
        inner.multi_set(["one", "two"], ["1", "2"])
    assert inner.multi_get(["two", "one"]) == [b"2", b"1"]
    assert inner.get("swapped") == b"bc"
    assert inner.check(["one", "two"]) and not inner.check(["one", "none"])
    meet(store, "read")
    if rank == 1:
        assert inner.delete_key("one") and not inner.delete_key("one")
        store.set("deleted", "")
    store.wait(["deleted"])
    assert not inner.check(["one"]) and inner.has_extended_api()
    store.barrier("the end", size)
    complain(store)


def complain(store: Store) -> None:
    """The errors that TCPStore raises."""
    usual = store.timeout
    for wait in (
        lambda: store.wait(["a", "b"], timedelta(milliseconds=300)),
        lambda: PrefixStore("inner", store).get("a"),
        lambda: store.multi_get(["a"]),
    ):
        began = time.monotonic()
        kind, text = refused(wait)
        assert kind is DistStoreError and text.startswith("wait timeout after 300ms, keys: "), text
        assert 0.3 <= time.monotonic() - began < 5
        store.set_timeout(timedelta(milliseconds=300))
    store.set_timeout(usual)
    kind, text = refused(lambda: store.set("large", b"x" * (1 << 20)))
    assert kind is DistStoreError and "large': a value of 1,048,576 bytes is too large" in text
    store.set(f"text {dist.get_rank()}", "no number")
    kind, text = refused(lambda: store.add(f"text {dist.get_rank()}", 1))
    assert kind is DistStoreError and "no whole number" in text
    assert refused(lambda: store.wait("a"))[0] is TypeError


def loses(store: Store) -> None:
    """One host dies; the others go on asking its store."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(store.get("after")))
    waiter.start()
    store.set(f"of {rank}", str(rank))
    store.add("n", 1)
    meet(store, "begun")
    say(ready=rank)
    longest = 0.0
    while not group.lost:
        began = time.monotonic()
        store.add("ticks", 1)
        longest = max(longest, time.monotonic() - began)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
    assert [int(store.get(f"of {k}")) for k in range(size)] == list(range(size))
    assert store.add("n", 0) == size and not found
    _, text = refused(lambda: store.wait([f"never {rank}"], timedelta(milliseconds=300)))
    assert text.endswith(f"(lost: {group.names[group.lost[0]]})"), text
    store.add("n", 1)
    if rank == max(set(range(size)) - set(group.lost)):
        store.set("after", "it")
    waiter.join()
    assert found == [b"it"]
    say(longest=longest, lost=group.lost)


def comes(store: Store) -> None:
    """A process that is killed comes back, and shares the store from its first sync on."""
    group, state = dist.group.WORLD.group, nicps.torch.State(step=0)
    rank, late = dist.get_rank(), group.late
    if late:
        kind, text = refused(lambda: store.get("of 0"))
        assert kind is DistNetworkError and "has come late to a group" in text, text
    else:
        store.set(f"of {rank}", str(rank))
        assert int(store.get(f"of {(rank + 1) % 3}")) == (rank + 1) % 3
    while True:
        state.sync()
        if late:
            late = False
            assert [int(store.get(f"of {k}")) for k in range(3)] == [0, 1, 2]
            store.add("back", 1)
        store.add("steps", 1)
        done = torch.tensor([int(store.check(["back"]))])
        dist.all_reduce(done, dist.ReduceOp.MAX)
        say(step=state.step, rank=dist.get_rank())
        state.step += 1
        if done.item():
            break
        time.sleep(0.02)
    meet(store, "all are here")
    say(steps=store.add("steps", 0), back=int(store.get("back")))


def main(settings: dict[str, Any]) -> None:
    """Join, run that part, and check that the store ends with the group."""
    torch.set_num_threads(1)
    dist.init_process_group("nicps", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    assert store.timeout == timedelta(seconds=60)
    say(formed=dist.get_rank(), late=dist.group.WORLD.group.late)
    {"shares": shares, "loses": loses, "comes": comes}[settings["what"]](store)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(refused, lambda: store.get("never"))
        dist.destroy_process_group()
        kind, text = waits.result()
    assert kind is DistNetworkError and "the store is over here" in text, text
    assert refused(lambda: store.set("k", "v"))[0] is DistNetworkError
    say(done=True)


if __name__ == "__main__":
    main(orjson.loads(sys.argv[1]))
