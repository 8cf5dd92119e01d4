# SPDX-License-Identifier: Apache-2.0
"""Loops over numbers that numba compiles in a child process. This process gets their machine code, some 15 kB.

build.py         the child process, and what it does with a loop
elf.py           machine code out of an object file, without a linker
factors.py       the loops of nicps.torch.factors, apart from PyTorch, which the child process must not import
machine_code.py  how the code is called, and kept for the next process

The loops of lanes are in `nicps/session/loop_sources.py`.

There is NumPy's or PyTorch's code for the same beside each loop. It is the reference, and does the work where there are
no loops: numba is not installed, or the processor is no x86-64.
"""
