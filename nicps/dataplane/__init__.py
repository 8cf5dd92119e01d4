# SPDX-License-Identifier: Apache-2.0
"""The data plane: XDP programs on an interface, their maps as NumPy views, the TX ring, the packet socket."""

from nicps.dataplane.plane import DataPlane
from nicps.dataplane.txring import TxRing

__all__ = ["DataPlane", "TxRing"]
