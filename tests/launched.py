"""torchrun and the command for tests: processes are forked from one that has imported torch and fastattn.

torchrun itself imports for two seconds of a processor, and every process that trains for five."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import uuid
from unittest import mock

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fastattn_command

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["launched", "fastattn.cli", "fastattn.translation.train", "torch._dynamo"])


class Launch:
    """Processes that call a function, with one thread each, under the agent of `torchrun --standalone`.

    The agent ends all of them if one fails, and starts them again up to `restarts` times. `pickle` must find the
    function by its name. Its result is the exit status of its process.

    Attributes as of `subprocess.Popen`: `pid` and `returncode` of the agent, and `stderr` of all."""

    def __init__(self, processes, restarts, function, *arguments):
        reader, writer = FORKS.Pipe(duplex=False)
        self._agent = _forked(_agent, writer, processes, restarts, function, arguments)
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


def _forked(function, *arguments):
    # Before Python 3.14 the server imports from PYTHONPATH, not from this process's path.
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}):
        process = FORKS.Process(target=function, args=arguments)
        process.start()
    return process


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


# A program that has `fastattn` run elsewhere, with its own files, folder and environment, and ends with its status.
CLIENT = """#!{python} -S
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    call = json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()
    socket.send_fds(server, [len(call).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(call)
    sys.exit(server.recv(1)[0])
"""


@contextlib.contextmanager
def command(path, prepare=None):
    """Write a program that acts as `fastattn` while the context lasts. Its processes have one thread each. The one that
    they are forked from has called `prepare`, which `pickle` must find."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{path}.socket")
        listener.listen()
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        server = _forked(_serve, listener, prepare)
        try:
            yield
        finally:
            server.kill()
            server.join()


def _serve(listener, prepare):
    if prepare:
        prepare()
    while True:
        client, _ = listener.accept()
        if not os.fork():
            _answer(client)
        client.close()


def _answer(client):
    """Run the command in a child, whose status is the answer."""
    size, files, *_ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as stream:
        folder, environment, arguments = json.loads(stream.read(int.from_bytes(size, "big")))
    if not (child := os.fork()):
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if number == 0 else "w", 1) for number in range(3))
        os.chdir(folder)
        os.environ.update(environment)
        torch.set_num_threads(1)
        sys.exit(fastattn_command.main(arguments))
    client.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]))
    os._exit(0)
