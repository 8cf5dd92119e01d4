# SPDX-License-Identifier: Apache-2.0
"""The protocol in virtual time: the production state machines under seeded schedules of faults.

lan.py      the LAN: loss, duplication, reordering, delay, cuts; virtual time; the trace
base_host.py  one host: the protocol's node, a model of its XDP program, the frames that come up
host.py     one with the life of a job, and models of its agent, its disk and its training program
stripes.py  its XDP program's part in the exchange stripes; places.py, what that one writes to
checks.py   the invariants, looked at after every step
sums.py     those of the sums of stripes, which it makes again from gradients.py
servers.py  parameter servers: what the XDP program does; served_places.py, what it writes to, and served_receiver.py,
            what the protocol reads of that; served_host.py, the job around it, served_lead.py, served_program.py,
            served_checks.py and served_schedules.py
channel_lan.py  phases with channels, without the life of a job: channel_host.py, channel_program.py,
            channel_checks.py; channel_kernel.py, a kernel with areas, and channel_wire.py, the LAN, are shared with
sized_lan.py  groups with channels, whose rounds have sizes of their own: sized_calls.py, what is called,
            sized_program.py and sized_checks.py
planned_lan.py  the life of a job whose steps have a plan: planned_host.py, planned_program.py, planned_checks.py
faults.py   schedules of faults, from a seed
__main__.py python -m tests.simulator --seed 17 --trace: one schedule again, readable
"""
