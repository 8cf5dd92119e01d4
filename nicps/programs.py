# SPDX-License-Identifier: Apache-2.0
"""The programs that nicps, its labs and its tests call: where they are found, and what installs them.

A program is looked for in PATH, then beside the interpreter: a virtual environment need not be active for its
programs to be used.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from nicps.errors import EnvironmentProblem

_PIP = f"{sys.executable} -m pip install virtme-ng"
_P4LANG = "the p4lang project's package {}, see docs/switch.md"

#: What installs each program that is called: a Debian package, or as it says.
PACKAGES = {
    "busybox": "Debian package busybox-static",
    "depmod": "Debian package kmod",
    "dpkg-deb": "Debian package dpkg",
    "ifconfig": "Debian package net-tools",
    "ip": "Debian package iproute2",
    "iperf3": "Debian package iperf3",
    "java": "Debian package openjdk-17-jre-headless",
    "mnexec": "Debian package mininet",
    "nsenter": "Debian package util-linux",
    "p4c-bm2-ss": _P4LANG.format("p4lang-p4c"),
    "ping": "Debian package iputils-ping",
    "qemu-system-x86_64": "Debian package qemu-system-x86",
    "rm": "Debian package coreutils",
    "simple_switch": _P4LANG.format("p4lang-bmv2"),
    "tc": "Debian package iproute2",
    "udevadm": "Debian package udev",
    "unshare": "Debian package util-linux",
    "virtme-run": _PIP,
    "vng": _PIP,
}


def search_path() -> str:
    """The PATH for a program that calls other programs of the table itself."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def find_program(name: str) -> str | None:
    """The path of an installed program; None where there is none."""
    return shutil.which(name, path=search_path())


def missing_programs(*names: str) -> list[str]:
    """Those that are not installed, each with what installs it."""
    return [f"{name} ({PACKAGES[name]})" for name in names if find_program(name) is None]


def require_programs(*names: str, purpose: str) -> list[str]:
    """The paths of all these programs.

    Args:
        purpose: what needs them, as a subject: "a guest".

    Raises:
        EnvironmentProblem: some are not installed; the message names all of them.
    """
    if missing := missing_programs(*names):
        raise EnvironmentProblem(
            f"{purpose} needs {', '.join(missing)}: not in PATH, nor beside {sys.executable}"
        )
    return [str(find_program(name)) for name in names]
