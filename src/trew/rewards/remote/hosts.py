"""Deals a run's grading out to reward hosts.

What a lost host was asked goes to another one, or is graded here. Verdicts are the same everywhere: what decides them
is compared when a host is connected.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..builtin.kinds import KINDS, graded_together
from ..isolation.pool import run_together
from ..user.packing import packed_calls, unpacked_outcomes
from ..user.session import CallOutcome, FunctionCall, FunctionHost, Spec
from ..user.wire import decode, encode
from ..verdict import Verdict
from . import match
from .messages import ABOUT, CALL, GRADE, MOST_BYTES, SILENT_S, unpacked_verdicts

if TYPE_CHECKING:
    import httpx2

    from ..user.functions import UserFunction

AT_ONCE = 4
"""Requests that a host works on at a time: enough for the next to be there when one is done."""
MOST_ITEMS = 32
"""Completions in a request: what is lost with a host is done again."""
WORK_S = 3600.0
"""Seconds that one request may take, however busily the host works on it."""
RETRY_S = 15.0
"""Seconds between two tries to reach a lost host again."""
_CONNECT_S = 10.0


class HostError(Exception):
    """A host that gave no answer, or one that cannot be right."""


class RemoteHost:
    """A reward host at ``address`` (a URL)."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token
        self.usable = False
        self.open = 0  # requests that it works on
        self._made: httpx2.Client | None = None

    def __str__(self) -> str:
        return f"reward host {self.address}"

    def begin(self) -> None:
        """Starts it if it does not run and the run is to start it. Raises HostError, ConfigError."""

    def about(self) -> Any:
        """What must agree with the run. Raises HostError; ConfigError where the token is not the host's."""
        status, found = self._ask("GET", ABOUT, None, seconds=SILENT_S)
        if status == 401:
            got = "another one" if self._token else "none: TREW_REWARDS_TOKEN is not set"
            raise ConfigError(f"{self}: needs its token, got {got}; set TREW_REWARDS_TOKEN to that of the host")
        if status != 200 or not isinstance(found, dict):
            raise HostError(f"{self}: is no reward host (status {status})")
        return found

    def work(self, path: str, body: bytes, *, seconds: float) -> Any:
        """The answer to a request. Raises HostError."""
        status, found = self._ask("POST", path, body, seconds=seconds)
        if status != 200 or not isinstance(found, dict) or "answer" not in found:
            said = found.get("error") if isinstance(found, dict) else found
            raise HostError(f"{self}: status {status}: {said!s:.300}")
        return found["answer"]

    def close(self) -> None:
        """Closes its connections; requests in progress fail."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def _ask(self, method: str, path: str, body: bytes | None, *, seconds: float) -> tuple[int, Any]:
        import httpx2

        until, pieces, size = time.monotonic() + seconds, [], 0
        given = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            with self._client().stream(method, f"{self.address}{path}", content=body, headers=given) as response:
                for piece in response.iter_bytes():
                    # Spaces in front are the host's signs of life, which must not fill the memory.
                    pieces.append(piece.lstrip(b" ") if not size else piece)
                    size += len(pieces[-1])
                    if size > MOST_BYTES or time.monotonic() > until:
                        limit = f"{seconds:g} s" if size <= MOST_BYTES else f"{MOST_BYTES} bytes"
                        raise HostError(f"{self}: no whole answer within {limit}")
            return response.status_code, decode(b"".join(pieces))
        except (httpx2.HTTPError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            # RuntimeError: the client was closed in another thread; the last three: an answer that cannot be read.
            silent = f"no sign of life for {SILENT_S:g} s" if isinstance(error, httpx2.ReadTimeout) else str(error)
            raise HostError(f"{self}: {silent or type(error).__name__}") from None

    def _client(self) -> httpx2.Client:
        import httpx2

        if self._made is None:
            limit = httpx2.Timeout(SILENT_S, connect=_CONNECT_S, pool=None)
            encrypted = self.address.startswith("https:")
            self._made = httpx2.Client(transport=httpx2.HTTPTransport(verify=encrypted), timeout=limit, trust_env=False)
        return self._made


class RewardHosts:
    """The reward hosts of a run. ``own`` is what must agree (:func:`.match.described`); ``tell`` receives what happens
    to hosts, one line each."""

    def __init__(self, hosts: Sequence[RemoteHost], *, own: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        self.hosts = [*hosts]
        # Through JSON, as the hosts' descriptions come.
        self._own, self._tell = json.loads(json.dumps(own)), tell
        self._lock, self._ending = threading.Lock(), threading.Event()

    def connect(self) -> None:
        """Connects all hosts. Raises ConfigError with everything that is wrong with any of them."""
        problems: list[str] = []
        for host in self.hosts:
            try:
                host.begin()
                problems += self._differences(host)
            except HostError as error:
                problems.append(f"cluster.reward_hosts: {error}")
            except ConfigError as error:
                problems += error.problems
        if problems:
            self.close()
            raise ConfigError(problems)
        for host in self.hosts:
            host.usable = True

    def close(self) -> None:
        """Closes all connections; no host is tried again."""
        self._ending.set()
        for host in self.hosts:
            host.usable = False
            host.close()

    def grade(self, number: int, kind: str, items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
        """The verdicts of the run's reward ``number``, a built-in of this kind, on (completion, gold, arguments)."""
        # Parts for every place on every host, none larger than MOST_ITEMS.
        size = max(1, min(MOST_ITEMS, -(-len(items) // (AT_ONCE * len(self.hosts)))))
        parts = [items[i : i + size] for i in range(0, len(items), size)]

        def one(part: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
            body = encode([number, part])
            found = self._ask(GRADE, body, lambda rows: unpacked_verdicts(rows, len(part)), seconds=WORK_S)
            # None: no host is left.
            return graded_together(KINDS[kind], part) if found is None else found

        done = run_together(one, parts, size=AT_ONCE * len(self.hosts))
        return [verdict for part in done for verdict in part]

    def call(self, call: FunctionCall, *, step: int) -> CallOutcome | None:
        """The outcome of a call of a function; None if no host is left."""
        body = encode([*packed_calls([call]), step])

        def read(rows: Any) -> CallOutcome:
            [outcome] = unpacked_outcomes(rows)
            if outcome.whole is None and len(outcome.values) != len(call.samples):
                raise ValueError(f"{len(outcome.values)} values for {len(call.samples)} completions")
            return outcome

        # A verl function is called once for each completion, each time with the whole limit.
        per_completion = len(call.samples) if call.function.verl else 1
        return self._ask(CALL, body, read, seconds=WORK_S + per_completion * (call.limit or 0.0))

    def _ask(self, path: str, body: bytes, read: Callable[[Any], Any], *, seconds: float) -> Any:
        """The answer of a host; if that host is lost, of another one; None if no host is left."""
        tried: set[RemoteHost] = set()
        while (host := self._next(tried)) is not None:
            tried.add(host)
            try:
                return read(host.work(path, body, seconds=seconds))
            except HostError as error:
                self._lose(host, str(error))
            except (ValueError, TypeError, KeyError) as error:
                self._lose(host, f"{host}: an answer that cannot be right: {error}")
            finally:
                with self._lock:
                    host.open -= 1
        return None

    def _next(self, tried: set[RemoteHost]) -> RemoteHost | None:
        """The usable host with the least to do."""
        with self._lock:
            free = [host for host in self.hosts if host.usable and host not in tried]
            host = min(free, key=lambda host: host.open, default=None)
            if host is not None:
                host.open += 1
            return host

    def _lose(self, host: RemoteHost, why: str) -> None:
        with self._lock:
            # Only the first of several requests that fail on a host tells it and waits for its return.
            known, host.usable = not host.usable, False
        if known or self._ending.is_set():
            return
        left = sum(host.usable for host in self.hosts)
        self._tell(f"{why}; its work is done by {f'{left} other hosts' if left else 'this machine'}")
        threading.Thread(target=self._return, args=(host,), name="trew-reward-host", daemon=True).start()

    def _return(self, host: RemoteHost) -> None:
        """Tries a lost host again until it is back, with the same rewards."""
        told = ""
        while not self._ending.wait(RETRY_S):
            try:
                host.begin()
                problems = list(self._differences(host))
            except HostError:
                continue
            except ConfigError as error:
                problems = [*error.problems]
            if not problems:
                host.usable = True
                self._tell(f"{host}: is back")
                return
            if told != problems[0]:
                told = problems[0]
                self._tell(f"{told}; it is not used")

    def _differences(self, host: RemoteHost) -> Iterator[str]:
        found = host.about()
        yield from (f"{host}: {line}" for line in match.differences(self._own, found))


class FunctionsOnHosts:
    """A FunctionHost that asks reward hosts, and ``own`` once no host is left. Functions are loaded here as well: their
    descriptions are needed, and what to do when they fail is decided here."""

    def __init__(self, own: FunctionHost, hosts: RewardHosts) -> None:
        self.own, self._hosts = own, hosts

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        return self.own.load(specs)

    def call(self, calls: Sequence[FunctionCall], *, step: int = 0) -> list[CallOutcome]:
        """As FunctionHost.call; calls go to hosts side by side."""
        found = run_together(lambda call: self._hosts.call(call, step=step), calls, size=len(self._hosts.hosts))
        left = [i for i, outcome in enumerate(found) if outcome is None]
        if left:
            for i, outcome in zip(left, self.own.call([calls[i] for i in left], step=step), strict=True):
                found[i] = outcome
        return [outcome for outcome in found if outcome is not None]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._hosts.close()
        self.own.close()
