# SPDX-License-Identifier: Apache-2.0
"""The text of jobs that train until a test ends them."""

from __future__ import annotations

#: For LIGHT: it trains until there is a file.
HOOKS = """
PLACE = {place!r}

def done(state):
    return os.path.exists(PLACE + "/end")
"""

#: BatchNorm has buffers, and momentum a state; it trains until there is a file.
ENDLESS = """
import gc

PLACE = {place!r}
settings = Settings(batch=160, quorum=0.9, test_every=10**9, microbatch_seconds=0.01, checkpoint_s=0.0)

def model():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

def done(state):
    return os.path.exists(PLACE + "/end")

def found(name):
    return next(o for o in gc.get_objects() if type(o).__name__ == name)

def damage(what):
    if what == "weights":
        found("FlatModel").model[0].weight.data[0, 0] += 0.5
    elif what == "buffers":
        found("FlatModel")._averages[0].common[0] += 0.5
    else:
        optimizer = found("Training").optimizer
        next(iter(optimizer.state.values()))["momentum_buffer"][0, 0] += 0.5

def loss(model, batch):
    if model.training:
        for what in ("weights", "buffers", "optimizer"):
            order = "%s/%s.%s" % (PLACE, what, host())
            if os.path.exists(order):
                os.unlink(order)
                damage(what)
    return cross_entropy(model(batch["x"]), batch["y"].long())
"""
