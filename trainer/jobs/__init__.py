# SPDX-License-Identifier: Apache-2.0
"""The jobs that ship with nicps: MNIST, and scikit-learn's digits for where MNIST is not found."""
