"""For worker processes of system tests: a prompt that begins with four times token 7 kills the engine that gets it.

It stands for a prompt that makes a kernel crash: the process is gone at once, without a word.
"""

from __future__ import annotations

import os
import signal

from farfill.engine.jobs import Job
from farfill.engine.scheduler import Scheduler

DEADLY = (7, 7, 7, 7)

_submit = Scheduler.submit


def _submit_or_die(self: Scheduler, job: Job) -> None:
    if job.prompt[: len(DEADLY)] == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    _submit(self, job)


Scheduler.submit = _submit_or_die
