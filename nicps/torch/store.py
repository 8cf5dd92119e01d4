# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's store over the one that the members of a group share (docs/pytorch.md)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import distributed
from torch._C._distributed_c10d import Store

from nicps.collective import CollectiveFailed, Group, StoreRefused, StoreTimeout
from nicps.collective.store import Found

Value = str | bytes


class GroupStore(Store):
    """What TCPStore has, but for queues; its errors are TCPStore's too.

    `timeout` is C++'s: it bounds every call, and how long `get` and `wait` wait for their keys.
    """

    timeout: timedelta

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def set(self, key: str, value: Value) -> None:
        """Set a key."""
        self._ask("set", [key], [value])

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return bytes(self._ask("get", [key]).values[0])

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return self._ask("add", [key], amount=amount).amount

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys).amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set a key that has the expected value, or that is missing where that is empty; return what it has now."""
        return bytes(self._ask("swap", [key], [expected_value, desired_value]).values[0])

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask("count").amount

    def list_keys(self) -> list[str]:
        """All keys."""
        return self._ask("list").values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        self._ask("wait", keys, timeout=timeout)

    def append(self, key: str, value: Value) -> None:
        """Put it behind what is there."""
        self._ask("append", [key], [value])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values, once all are there."""
        return self._ask("get", keys).values

    def multi_set(self, keys: list[str], values: Sequence[Value]) -> None:
        """Set all at once."""
        self._ask("set", keys, values)

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> GroupStore:
        """It is for any thread."""
        return self

    # A PrefixStore asks for them by their names of C++.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def _ask(
        self,
        what: str,
        keys: Sequence[str] = (),
        values: Sequence[Value] = (),
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> Found:
        if isinstance(keys, str):
            raise TypeError(f"keys must be a list of texts, not {keys!r}")
        packed = [each.encode() if isinstance(each, str) else bytes(each) for each in values]
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        try:
            return self._group.store.ask(what, keys, packed, amount, timeout_s=seconds)
        except StoreTimeout:
            lost = ", ".join(self._group.names[rank] for rank in self._group.lost)
            raise distributed.DistStoreError(
                f"wait timeout after {1000 * seconds:.0f}ms, keys: {', '.join(keys)}"
                + (f" (lost: {lost})" if lost else "")
            ) from None
        except StoreRefused as error:
            raise distributed.DistStoreError(str(error)) from None
        except CollectiveFailed as error:
            raise distributed.DistNetworkError(str(error)) from None
