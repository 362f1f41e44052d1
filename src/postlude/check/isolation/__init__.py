"""A candidate in a separate process, so that its mistakes and simple tricks do not affect its verdict.

    with Candidate(path, init_args, device="cuda", limits=Limits(call_s=30)) as candidate:
        candidate.load_state(state)
        answered = candidate.forward(inputs)

The process gets a copy of the candidate's file, constructor arguments, states, inputs and weights for gradients.
It is never given the reference, the truth, the tolerances or the clock. What it does to its own process (patching
torch, exiting, hanging, crashing, printing endlessly, sending garbage) stays there: messages are JSON and tensors are
bytes, both bounded and strictly checked; nothing is unpickled, and printed output is never a message. However it ends,
`CandidateFailed` says so in one sentence, and no process of its group, no shared memory and no file of its folder is
left.

This does NOT protect against the following; for that, run all of Postlude in a container or a virtual machine:

- The candidate runs as the same user. It can use the network, read and write every file that this user can (the
  reference too, if it guesses or finds its path: the verifier's command line and working folder can be looked up by
  any process of the user), and fill disks outside its own folder. As root it can also lift the limits set on it.
- A process of the same user can end the verifier by a signal (there is then no verdict) and may, depending on the
  system, trace it and change its memory. `protect_this_process` closes the second way unless the user is root; it is
  for a program to call, not for a library.
- Processes that the candidate starts in sessions of their own (setsid) are not in its group and survive it. Until a
  limit ends it, a candidate can start as many processes and use as much memory and GPU memory as the user may.
- The kernel, the GPU driver and the GPU itself are shared: a candidate can attack them, leave the GPU broken, read
  GPU memory that drivers do not clear, or slow down what is timed beside it.
- The candidate controls its own process, so its answer is all that is known: it can answer a timed request early and
  compute later, or restore inputs that it changed. `Candidate.time_calls` gives the outputs to compare.
"""

from __future__ import annotations

from postlude.check.isolation.candidate import Answered, Candidate, Timed
from postlude.check.isolation.environment import protect_this_process
from postlude.check.isolation.process import CandidateFailed, Limits

__all__ = ["Answered", "Candidate", "CandidateFailed", "Limits", "Timed", "protect_this_process"]
