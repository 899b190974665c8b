"""Calls in forks of a process that has imported torch, which takes longer than a short call.

A fork may load a library that a process can hold only one of, and may crash.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import fastattn

END = "exit status "


@contextlib.contextmanager
def forks(module):
    """Yield a function that calls the module's ``main`` with these arguments in a fork. It returns (status, output)."""
    environment = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parent.parent)}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, __file__, module], env=environment, **options) as process:

        def call(*arguments):
            print(json.dumps([str(argument) for argument in arguments]), file=process.stdin, flush=True)
            lines = []
            for line in process.stdout:
                if line.startswith(END):
                    return int(line.removeprefix(END)), "".join(lines)
                lines.append(line)
            raise AssertionError("".join(lines))

        yield call
        process.stdin.close()


def serve(name):
    """Call the module's ``main`` for each line of arguments."""
    module = importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                module.main(*json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(f"\n{END}{os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
