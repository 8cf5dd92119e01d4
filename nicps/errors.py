# SPDX-License-Identifier: Apache-2.0
"""The errors that nicps raises, as one tree.

    NicpsError                      exit code 1
    ├── UsageProblem                2   the command or its arguments are wrong
    │   └── MessageError                a message at the agent's socket is not as docs/socket.md says
    ├── EnvironmentProblem          3   this host lacks something
    │   ├── NotRoot                     privileges
    │   ├── KernelHeadersMissing        what BCC compiles against
    │   ├── BpfLoadError                a kernel or compiler that takes our BPF programs
    │   ├── InterfaceMissing            a network interface of that name
    │   ├── InterfaceDown               the interface is down
    │   ├── InterfaceUnfit              the interface cannot carry our frames or programs
    │   └── InterfaceBusy               another XDP program is on the interface
    ├── NetworkProblem              4   another host, or the local agent, is not there or does not fit
    │   └── WireError                   bytes that are not a frame of ours
    └── JobFailed                   5   the job, its data or its model
        ├── NonFinite                   a gradient holds NaN or infinity
        ├── TooLarge                    a number is too large for parameter servers
        ├── LeftOut                     a vector is in no sum
        ├── JobAborted                  the job was stopped: by the user, or because a member failed
        ├── Alarm                   6   too few members are left, or they differ; the model is saved
        ├── Cancelled               7   a user has cancelled the job
        ├── NotKept                 8   what the scripts of a run have left could not be kept
        └── GradientFormatError         a gradient in JSON has not its form, or does not fit the model

More leaves are defined beside what raises them: in nicps.collective.errors, nicps.session.channel, nicps.gateway,
nicps.switchauth, nicps.switch.adding, nicps.switch.grants, nicps.lab.errors, trainer.errors and trainer.order.

A message is one line: what is wrong, with the value, and what to do.
"""

from __future__ import annotations


class NicpsError(Exception):
    """Base of all; `exit_code` is the command's."""

    exit_code = 1


class UsageProblem(NicpsError):
    """The command or its arguments are wrong."""

    exit_code = 2


class MessageError(UsageProblem):
    """A message at the agent's socket is not as docs/socket.md says."""


class EnvironmentProblem(NicpsError):
    """This host lacks something that nicps needs."""

    exit_code = 3


class NetworkProblem(NicpsError):
    """Another host, or the local agent, is not there or does not fit."""

    exit_code = 4


class WireError(NetworkProblem):
    """Bytes that are not a frame of ours."""


class JobFailed(NicpsError):
    """The job, its data or its model cannot go on."""

    exit_code = 5


class NonFinite(JobFailed):
    """A gradient holds NaN or infinity; `index` is where in the vector."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"the gradient is {value} at index {index}")
        self.index = index


class TooLarge(JobFailed):
    """A number of a step, or a parameter, is too large for parameter servers; `index` is where in the vector."""

    def __init__(self, index: int, value: float, what: str) -> None:
        super().__init__(
            f"{what} {value:.6g} at index {index}: servers take steps below 2**21, parameters below 2**22"
        )
        self.index, self.value, self.what = index, value, what


class LeftOut(JobFailed):
    """A vector is in no sum: offer it again in round `next_round`."""

    def __init__(self, message: str, next_round: int) -> None:
        super().__init__(f"{message}: offer it again in round {next_round}")
        self.next_round = next_round


class JobAborted(JobFailed):
    """The job was stopped: by the user, or because a member failed."""


class Alarm(JobFailed):
    """Too few members are left (R22): the model was saved, and the job can be resumed."""

    exit_code = 6


class Cancelled(JobFailed):
    """A user has ended the job before its end (`nicps cancel`)."""

    exit_code = 7


class NotKept(JobFailed):
    """Files that the scripts of `nicps run` have left at a host could not be put into the run's folder there."""

    exit_code = 8


def explain(doing: str, error: Exception) -> str:
    """An error in one line. Ours say what is wrong; before what the system says comes what could not be done."""
    if isinstance(error, NicpsError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"cannot {doing}: {where}{error.strerror}"
    return f"cannot {doing}: {error or repr(error)}"


class NotRoot(EnvironmentProblem):
    """The command needs privileges that this process lacks."""


class KernelHeadersMissing(EnvironmentProblem):
    """BCC has nothing to compile against."""


class BpfLoadError(EnvironmentProblem):
    """A BPF program could not be compiled or loaded; `log` holds all that compiler and verifier said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class InterfaceMissing(EnvironmentProblem):
    """There is no such network interface."""


class InterfaceDown(EnvironmentProblem):
    """The network interface is down."""


class InterfaceUnfit(EnvironmentProblem):
    """The network interface cannot carry our frames or programs."""


class InterfaceBusy(EnvironmentProblem):
    """Another XDP program is on the interface, ours or somebody else's."""


class GradientFormatError(JobFailed):
    """A gradient in JSON that does not fit its form or the model (R8)."""
