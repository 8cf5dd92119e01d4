# SPDX-License-Identifier: Apache-2.0
"""What a training program touches: the arena it converts gradients into, the sums it reads, and its connection to
the agent.
"""
