# SPDX-License-Identifier: Apache-2.0
"""Names the packages; everything else about the build is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(
            include=["nicps*", "trainer*"], exclude=["*.__pycache__", "*.__pycache__.*"]
        ),
        "nicps._ebpf",
        "nicps._p4",
    ],
    package_dir={"nicps._ebpf": "ebpf", "nicps._p4": "p4"},
)
