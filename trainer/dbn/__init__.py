# SPDX-License-Identifier: Apache-2.0
"""A deep belief network, trained by iterative reduce (H1 to H4; docs/dbn.md).

settings.py      what a run is made of, and the schedules that follow from it
rbm.py           a restricted Boltzmann machine: contrastive divergence, as pure functions
network.py       the stack unrolled into a classifier: dropout, gradient descent, conjugate gradients
shards.py        MNIST, dealt to the workers; the random numbers of each piece of work
vectors.py       parameters as one vector; exact means of vectors
work.py          what a worker does with a piece of work: a pure function
reduce.py        what a reducer is: an epoch, of one mean or several
reduce_local.py  the workers as threads of this process
managers.py      who manages a cluster of Apache Spark, and whether it can be reached
cluster.py       such a cluster: how an application begins and ends on it, what it says
reduce_spark.py  the workers as tasks of Spark, whose driver adds
reduce_nicps.py  the same, with the kernels of the executors' hosts that add
master.py        the master: layer by layer, then the classifier
checkpoint.py    what a run goes on from
signals.py       what ends a run in order
model.py         the classifier as a file, and how to use it
progress.py      a line an epoch, with the time that is left
pictures.py      grey pictures as PNG, and tables of them
report.py        report.html of a run
cli.py           the options of `nicps dbn`, and its errors
__main__.py      what `nicps dbn` and spark-submit start
"""
