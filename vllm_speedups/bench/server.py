"""vLLM's OpenAI-compatible server for side-by-side runs: in processes of its own, stock or patched, asked over real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from .engine import EngineFailed, environment

# Seconds in which a server has to be ready.
START_TIMEOUT = 300


class Server:
    """One server. Used as a context manager, it ends with the block.

    `arguments` are those of its command line by their Python names: True gives the bare option, a list several values,
    and anything else its text or JSON.
    """

    def __init__(self, arguments: dict, patched: bool, extra: dict | None = None):
        self.patched = patched
        self.port = _free_port()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `close`)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_options(arguments)]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)],
            env=environment(
                patched,
                {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", **(extra or {})},
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Block until it answers. Raises EngineFailed if it ends before, or takes longer than START_TIMEOUT."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = "\n".join(self.output().splitlines()[-25:])
                    raise EngineFailed(f"the server did not start:\n{tail}") from None
                time.sleep(0.2)

    def get(self, path: str) -> str:
        """The body of a GET request. Raises OSError where the server does not answer, or not with success."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def ask(self, requests: list, concurrent: int = 64) -> list:
        """The answers to requests, (path, body, more) each, streamed and `concurrent` at a time. See `stream`."""
        return asyncio.run(ask([(self, request) for request in requests], concurrent))

    def metrics(self) -> dict:
        """vLLM's own metrics, name -> sum over all labels."""
        sums: dict = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def memory(self) -> float:
        """Resident bytes of all its processes; pages that several share count once a process."""
        return float(sum(_resident(pid) for pid in self.processes()))

    def cpu(self) -> float:
        """Seconds of CPU time that its processes have taken: on a busy machine these tell more than the clock."""
        return sum(map(_cpu, self.processes()))

    @property
    def pid(self) -> int:
        """The process that was started, which starts the others."""
        return self._process.pid

    def processes(self) -> list:
        """The ids of the server's process and all that it started."""
        return _family(self._process.pid)

    def output(self) -> str:
        """What its processes have printed so far."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """End the server and all that it started."""
        family = self.processes() if self._process.poll() is None else []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pid in family[1:]:
            _end(pid)
        self._log.close()


async def ask(addressed: list, concurrent: int) -> list:
    """The answers to (server, request) pairs, in their order, `concurrent` of them at a time."""
    import aiohttp

    gate = asyncio.Semaphore(concurrent)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(server: Server, request: tuple) -> dict:
            async with gate:
                return await stream(session, server, *request)

        return list(await asyncio.gather(*(one(*pair) for pair in addressed)))


async def stream(session, server: Server, path: str, body: dict, leave_after: int | None = None) -> dict:
    """Ask, and read the answer as it streams in. `leave_after`: chunks after which the client hangs up.

    Returns `ids`, `texts` and `finish` of each choice, `calls` with the names and arguments of tools that it called,
    `error` (status and text) where the server refuses, and `times`: seconds from the request to each chunk.
    """
    answer: dict = {"ids": {}, "texts": {}, "finish": {}, "calls": {}, "error": None, "times": []}
    begun = time.perf_counter()
    body = {"stream": True, "return_token_ids": True, **body}
    async with session.post(f"http://127.0.0.1:{server.port}{path}", json=body) as response:
        if response.status != 200:
            answer["error"] = [response.status, await response.text()]
            return answer
        chunks = 0
        async for line in response.content:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            answer["times"].append(time.perf_counter() - begun)
            _add(answer, json.loads(line[5:]))
            chunks += 1
            if chunks == leave_after:
                response.close()
                break
    return answer


def _add(answer: dict, chunk: dict) -> None:
    if "error" in chunk:
        answer["error"] = [200, chunk["error"]]
    for choice in chunk.get("choices", ()):
        index, delta = str(choice["index"]), choice.get("delta") or {}
        answer["ids"].setdefault(index, []).extend(choice.get("token_ids") or ())
        text = choice.get("text") or (delta.get("content") or "") + (delta.get("reasoning") or "")
        answer["texts"][index] = answer["texts"].get(index, "") + text
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            said = answer["calls"].setdefault(f"{index}.{call['index']}", ["", ""])
            said[0] += function.get("name") or ""
            said[1] += function.get("arguments") or ""
        if choice.get("finish_reason"):
            answer["finish"][index] = choice["finish_reason"]


def _options(arguments: dict) -> list:
    options = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            options.append("--no-" + name.replace("_", "-"))
        elif value is True:
            options.append(option)
        else:
            options += [option, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return options


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _family(pid: int) -> list:
    """A process and its descendants, from /proc."""
    children: dict = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(entry.name))
    found, work = [], [pid]
    while work:
        found.append(work.pop())
        work += children.get(found[-1], ())
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it ended meanwhile


def _cpu(pid: int) -> float:
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0  # it ended meanwhile
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
