"""Commands in processes forked from one that has imported what they import, which takes each of them seconds otherwise.

`python -m tests.warm FOLDER` puts `aurora` and `python` into FOLDER, and leaves a process that serves them until nobody has
FOLDER/users open any more. They do what the real ones do: each command is a process of its own, with the caller's arguments, folder,
environment, open files and network namespace, and so is the server that its ranks are forked from. Only a profile that was made
before, of the same arguments and texts, is not made again.
"""

import atexit
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import multiprocessing.util
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import aurora
from aurora.__main__ import main
from aurora.runtime.distributed.launcher import PRELOAD

SOCKET, USERS, PROFILES = "socket", "users", "profiles"
NETWORK = "/proc/self/ns/net"
CLONE_NEWNET = 0x40000000
COMMAND = f"""#!{sys.executable} -IS
import json, os, socket, sys
network = [os.open({NETWORK!r}, os.O_RDONLY)] if os.path.exists({NETWORK!r}) else []
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(sys.argv[0]), {SOCKET!r}))
    words = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [b" "], [0, 1, 2, *network])
    server.sendall(words)
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
sys.exit(code[0] if code else 1)
"""


def serve(folder: Path) -> None:
    """Answers every command, in a process that is left behind, until all users have gone."""
    for name in (*PRELOAD, *(module.name for module in pkgutil.walk_packages(aurora.__path__, "aurora."))):
        with suppress(ModuleNotFoundError):  # of what a GPU alone needs
            importlib.import_module(name)
    gc.freeze()  # what was imported is no garbage: to look for some would copy all of its memory in each process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    (folder / PROFILES).mkdir()
    os.mkfifo(folder / USERS)
    users = os.open(folder / USERS, os.O_RDONLY | os.O_NONBLOCK)  # ready when its last writer has gone
    with socket.create_server(str(folder / SOCKET), family=socket.AF_UNIX) as listener, selectors.DefaultSelector() as ready:
        for name in ("aurora", "python"):
            (folder / name).write_text(COMMAND)
            (folder / name).chmod(stat.S_IRWXU)
        ready.register(listener, selectors.EVENT_READ)
        ready.register(users, selectors.EVENT_READ)
        if os.fork():
            os._exit(0)  # the caller need not wait any more, and has no child
        while all(key.fileobj is listener for key, _ in ready.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(users)
                answer(connection, folder / PROFILES)
            connection.close()


def answer(connection: socket.socket, profiles: Path) -> None:
    """Performs a command in a child of this process, and tells its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(connection, 1, 4)
    arguments, folder, environment = json.load(connection.makefile())
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    connection.close()
    enter_network(files[3:])
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    fork_the_fork_server()
    try:
        if Path(arguments[0]).name == "aurora" and arguments[1:2] == ["profile"] and "-o" in arguments:
            with once(profiles, arguments[1:]) as made:
                if not made:
                    perform(*arguments)
        else:
            perform(*arguments)
    except SystemExit as ended:
        leave(ended.code)
    leave(None)


def leave(code: str | int | None) -> NoReturn:
    """Ends this process as `sys.exit` would, except that it clears no memory away: most of it is shared, and would be copied first."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def enter_network(namespaces: Sequence[int]) -> None:
    """Moves this process into the network namespace of the open file, if there is one and it is in another."""
    for namespace in namespaces:
        elsewhere = os.fstat(namespace).st_ino != os.stat(NETWORK).st_ino
        if elsewhere and ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)


def fork_the_fork_server() -> None:
    """Lets a process that is forked now become multiprocessing's fork server, should this one start that: it need import nothing."""
    ours, theirs = socket.socketpair()
    if (waiting := os.fork()) == 0:
        ours.close()
        try:
            code, files, *_ = socket.recv_fds(theirs, 1 << 16, 2)
            theirs.close()
            if code:  # else the command has ended
                listener, alive = files
                text = code.decode()
                exec(f"{text[: text.index('main(')]}main({listener}, {alive}, {text.split(', ', 2)[2]}")
        finally:
            os._exit(0)
    theirs.close()
    spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds

    def spawn_or_ask(path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(arguments[-1]):
            return spawn(path, arguments, files)
        multiprocessing.util.spawnv_passfds = spawn  # of another one, should this one end
        with ours:
            socket.send_fds(ours, [arguments[-1].encode()], list(files))
        return waiting

    multiprocessing.util.spawnv_passfds = spawn_or_ask


@contextmanager
def once(kept: Path, words: list[str]) -> Iterator[bool]:
    """Puts what an `aurora profile` of the same words and texts wrote and printed where this one should, and yields whether it could.

    If not, the block performs the command, which ends this process; if it succeeds, its file and output are kept.
    """
    output = Path(words[words.index("-o") + 1])
    content = [
        Path(word).read_bytes() if Path(word).is_file() else os.path.realpath(word) for word in words if word != str(output)
    ]
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    profile, printed = kept / f"{digest}.npz", kept / f"{digest}.out"
    with open(kept / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if profile.exists():
            shutil.copy(profile, output)
            os.write(1, printed.read_bytes())
            yield True
            return
        ours = os.dup(1)
        with open(printed, "wb") as file:
            os.dup2(file.fileno(), 1)
        try:
            yield False
        except SystemExit as ended:
            if not ended.code:
                shutil.copy(output, profile)
            raise
        finally:
            sys.stdout.flush()
            os.write(ours, printed.read_bytes())


def perform(command: str, *arguments: str) -> None:
    """Does what `aurora ...`, `python -c CODE`, `python -m MODULE ...` or `python SCRIPT ...` does, as the main module."""
    if Path(command).name == "aurora":
        sys.argv = [command, *arguments]
        main()
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(module))
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = list(arguments[1:]), ""
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(arguments), str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
    os._exit(0)
