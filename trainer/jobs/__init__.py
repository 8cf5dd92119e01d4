# SPDX-License-Identifier: Apache-2.0
"""The jobs that ship with nicps: MNIST, scikit-learn's digits for where MNIST is not found, and others."""
