"""torchrun for tests: its agent and workers are forked from a process that has imported torch and fastattn.

torchrun itself imports for two seconds of a processor, and every worker that trains for five."""

import multiprocessing
import os
import signal
import sys
import threading
import uuid
from unittest import mock

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["launched", "fastattn.cli", "fastattn.translation.train", "torch._dynamo"])


class Launch:
    """Processes that call a function, with one thread each, under the agent of `torchrun --standalone`.

    The agent ends all of them if one fails, and starts them again up to `restarts` times. `pickle` must find the
    function by its name. Its result is the exit status of its process.

    Attributes as of `subprocess.Popen`: `pid` and `returncode` of the agent, and `stderr` of all."""

    def __init__(self, processes, restarts, function, *arguments):
        reader, writer = FORKS.Pipe(duplex=False)
        # Before Python 3.14 the server imports from PYTHONPATH, not from this process's path.
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}):
            self._agent = FORKS.Process(target=_agent, args=(writer, processes, restarts, function, arguments))
            self._agent.start()
        writer.close()
        self.stderr = os.fdopen(os.dup(reader.fileno()), errors="replace")
        self.pid = self._agent.pid

    def communicate(self, timeout):
        """Wait for the end, and return None and the rest of `stderr`. After `timeout` seconds all are killed."""
        limit = threading.Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        limit.start()
        err = self.stderr.read()
        self._agent.join()
        limit.cancel()
        return None, err

    @property
    def returncode(self):
        return self._agent.exitcode


def _agent(stderr, processes, restarts, function, arguments):
    os.setpgrp()
    os.dup2(stderr.fileno(), sys.stderr.fileno())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _worker)(function, *arguments)


def _worker(function, *arguments):
    torch.set_num_threads(1)
    if status := function(*arguments):
        sys.exit(status)
