"""Commands in processes forked from one that has imported what they import, which takes each of them seconds otherwise.

`python -m tests.warm FOLDER` puts `aurora` and `python` into FOLDER, and serves them until its input ends. They do what the real ones do:
each command is a process of its own, with the caller's arguments, folder, environment and open files.
"""

import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import aurora
from aurora.__main__ import main
from aurora.runtime.distributed.launcher import PRELOAD

SOCKET = "socket"
COMMAND = f"""#!{sys.executable} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(sys.argv[0]), {SOCKET!r}))
    words = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(words)
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
sys.exit(code[0] if code else 1)
"""


def serve(folder: Path) -> None:
    """Answers every command until the input ends."""
    for name in (*PRELOAD, *(module.name for module in pkgutil.walk_packages(aurora.__path__, "aurora."))):
        with suppress(ModuleNotFoundError):  # of what a GPU alone needs
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.create_server(str(folder / SOCKET), family=socket.AF_UNIX) as listener, selectors.DefaultSelector() as ready:
        for name in ("aurora", "python"):
            (folder / name).write_text(COMMAND)
            (folder / name).chmod(stat.S_IRWXU)
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while all(key.fileobj is listener for key, _ in ready.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()


def answer(connection: socket.socket) -> None:
    """Performs a command in a child of this process, and tells its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    arguments, folder, environment = json.load(connection.makefile())
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    perform(*arguments)
    sys.exit()


def perform(command: str, *arguments: str) -> None:
    """What `aurora ...`, `python -c CODE` or `python SCRIPT ...` does, as the main module."""
    if Path(command).name == "aurora":
        sys.argv = [command, *arguments]
        main()
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(module))
    else:
        sys.argv, sys.path[0] = list(arguments), str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
