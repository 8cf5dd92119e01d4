# SPDX-License-Identifier: Apache-2.0
"""nicps: the network adds up gradients."""

__version__ = "0.1.0"
