"""One peer in a process of its own: ``python -m funcacc.bench.worker PEER WORK COUNT``.

Reads requests from standard input, one JSON object a line, and answers each by one:

    {"do": "steps", "count": n}     -> steps, seconds, host (until the calls returned)
    {"do": "schedule", "count": n}  -> programs: compiled since the first step, after n more with
                                       a schedule and a tail
    {"do": "figures"}               -> parts of the first call, peak_bytes, version
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch

from funcacc.bench.peers import PEERS, Peer


def main() -> None:
    """Answer requests until the input ends."""
    name, work, count = sys.argv[1:]
    # Libraries that log to standard output would break the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = PEERS[name](work, int(count))
    peer.wait()
    peer.programs_before = peer.programs() or 0
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_ANSWERS[request["do"]](peer, request)), file=answers, flush=True)


def _steps(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    host = 0.0
    start = time.perf_counter()
    for _ in range(request["count"]):
        called = time.perf_counter()
        peer.step(peer.window)
        host += time.perf_counter() - called
    peer.wait()
    seconds = time.perf_counter() - start
    return {"steps": request["count"], "seconds": seconds, "host": host}


def _schedule(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    for i in range(request["count"]):
        peer.step(peer.short if i == request["count"] - 1 else peer.window)
        peer.schedule.step()
    peer.wait()
    after = peer.programs()
    return {"programs": None if after is None else after - peer.programs_before}


def _figures(peer: Peer, _request: dict[str, Any]) -> dict[str, Any]:
    return {
        "parts": peer.seconds(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": torch.__version__,
    }


_ANSWERS = {"steps": _steps, "schedule": _schedule, "figures": _figures}

if __name__ == "__main__":
    main()
