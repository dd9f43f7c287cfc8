"""Start a real tritonserver with everything it needs, and leave nothing behind when it stops.

    with Runtime(RuntimeConfig(model_repository=Path("model_repository"))) as runtime:
        client = tritonclient.grpc.InferenceServerClient(runtime.endpoints.grpc)

A run has an id, a run directory (laid-out repository, backends, logs, credentials) and a directory
in shared memory (sessions, hot tier). `docs/runtime.md` lists both.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ctrlcache.errors import ConfigError, CtrlCacheError
from worldserve import processes
from worldserve.access import Access
from worldserve.canary import Canary, NoAnswer
from worldserve.concealed import ConcealmentRefused, start_concealed
from worldserve.gateway import ObjectStore
from worldserve.launch import embedded_store, run_parameters, server_command, start_guard
from worldserve.layout import find_server, lay_out_backends, lay_out_models, server_environment
from worldserve.loading import Loading, ServerLog, during, refused
from worldserve.serverapi import ApiRefused, ApiSilent, ServerApi
from worldserve.settings import (
    ColdStore,
    Endpoints,
    RuntimeConfig,
    free_ports,
    threads_per_instance,
)
from worldserve.shutdown import RUN_DIR_VARIABLE, clear_stop, request_stop

__all__ = ["ColdStore", "Endpoints", "Runtime", "RuntimeConfig", "StartFailed"]

_UNLOAD_S = 15.0  # of a model whose processes have ended already


class StartFailed(CtrlCacheError):
    """The server or a model did not come up; the text holds the end of the log."""


class Runtime:
    """One run: `start` and `stop` may be called from any thread, one at a time."""

    def __init__(self, config: RuntimeConfig, log: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.run_dir = config.run_dir or Path(tempfile.gettempdir()) / f"ctrlcache-{self.run_id}"
        self.shm_dir = config.shm / f"ctrlcache-{self.run_id}"
        self._region_prefix = f"ctrlcache-{self.run_id}-region-"
        self.log_file = self.run_dir / "logs" / "tritonserver.log"
        self._server_log = ServerLog(self.log_file)
        self.models: tuple[str, ...] = ()
        self.instances: dict[str, int] = {}
        self._ensembles: tuple[str, ...] = ()
        self.store: ObjectStore | None = None
        self._log = log or (lambda _: None)
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, ...] | None = None
        self._access = Access.open(config.access)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._failed = False

    # -- the life of a run ---------------------------------------------------------------------

    def start(self) -> Endpoints:
        """Lay out, start, and return when the canary model has answered; StartFailed otherwise."""
        with self._lock:
            try:
                self._prepare()
                self._start_server()
                self.wait_ready()
            except BaseException as error:
                # Its logs tell why; they stay.
                self._failed = isinstance(error, StartFailed)
                self.stop()
                raise
            self._write_description()
            return self.endpoints

    def stop(self) -> None:
        """End every process of the run and remove its files in shared memory; within 10 seconds."""
        self._stopping.set()
        if not self._lock.acquire(timeout=0.2):
            # Another thread waits for the server to start: without a server it gives up at once.
            self._kill_server()
            self._lock.acquire()
        try:
            self._stop_server()
            if self.store is not None:
                self.store.stop()
            left = processes.sweep(self.run_id, self.config.shm)
            if self._guard is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._guard.communicate(b"done\n", timeout=2)
                self._guard = None
            if self.config.run_dir is None and not self._failed:
                shutil.rmtree(self.run_dir, ignore_errors=True)
            if left:
                self._log(f"could not end {left}")
        finally:
            self._lock.release()

    def restart_server(self) -> None:
        """Stop and start tritonserver alone, on the same ports; sessions and tiers stay."""
        with self._lock:
            if self._stopping.is_set():
                raise StartFailed("the run is stopping")
            self._stop_server()
            processes.end_processes(self._server_processes)
            self._remove_regions()
            self._start_server()
            self.wait_ready()
            self._write_description()

    def reload_model(self, model: str, timeout_s: float = 60.0) -> None:
        """Bring a model back whose stub is dead, hung or stopped; StartFailed where it stays away.

        Its stubs are killed first: Triton would wait for one that will never answer. timeout_s: of
        loading. A server that is itself in no state to do it is not waited for.
        """
        with self._lock:
            processes.end_processes(lambda: self.stubs(model))
            try:
                wrong = during(lambda: self._reload(model, timeout_s), self._unable, every_s=1.0)
            except (ApiRefused, ApiSilent, NoAnswer) as error:
                wrong = str(error)
            if wrong:
                raise StartFailed(f"loading {model} again failed: {wrong}")

    def _reload(self, model: str, timeout_s: float) -> None:
        canary = self.canary(model)
        try:
            self.api.unload(model, min(timeout_s, _UNLOAD_S))
            self._load(model, timeout_s)
            for ensemble in self._ensembles:
                self.api.load(ensemble, timeout_s)
            canary.ask(timeout_s)
        finally:
            canary.end()

    def _unable(self) -> str | None:
        """Why the server can do nothing that is asked of it; None where it can."""
        if not self.alive:
            return "the server process ended"
        if self._server is not None and processes.Process(self._server.pid).state in "Tt":
            return "the server process is stopped"
        if self._ports is not None and (deaf := refused(tuple(self.config.servers), self._ports)):
            return f"the server does not listen on {deaf}"
        return None

    def _load(self, model: str, timeout_s: float) -> None:
        """`load`, which Triton may not answer where the new process dies at once."""
        self._server_log.mark()
        watch = Loading(partial(self.stubs, model), self.instances[model])
        if wrong := watch.during(lambda: self.api.load(model, timeout_s)):
            raise self._failure(f"loading {model} again failed: {wrong}")

    def wait_ready(self) -> None:
        """Return when the canary model has answered; StartFailed otherwise."""
        deadline = time.monotonic() + self.config.ready_timeout_s
        watches = [(m, Loading(partial(self.stubs, m), self.instances[m])) for m in self.models]
        while not self.api.ready():
            if not self.alive:
                raise self._failure("the server ended while starting")
            for model, watch in watches:
                watch.asked |= self._server_log.names_load_of(model)
                if wrong := watch.check():
                    raise self._failure(f"{model}: {wrong}")
            if time.monotonic() > deadline:
                raise self._failure("the server was not ready in time")
            time.sleep(0.1)
        model = self.canary_model
        canary = self.canary(model)
        try:
            canary.ask(max(1.0, deadline - time.monotonic()))
        except NoAnswer as error:
            raise self._failure(f"the server is ready, but no model answers: {error}") from None
        finally:
            canary.end()

    def __enter__(self) -> Runtime:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- what others ask ---------------------------------------------------------------------

    @property
    def endpoints(self) -> Endpoints:
        if self._ports is None:
            raise ConfigError("the run has no endpoints before start()")
        http, grpc, metrics = (
            f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
            for host, port in zip(self.config.servers, self._ports, strict=True)
        )
        gateway = self.store.endpoint if self.store is not None else None
        return Endpoints(http, grpc, metrics, gateway)

    @property
    def api(self) -> ServerApi:
        """The server's HTTP interface, with the keys of this run."""
        return ServerApi(self.endpoints.http, self._access.headers)

    def canary(self, model: str) -> Canary:
        """One that is let in."""
        return Canary(self.endpoints.http, model, self._access.headers)

    @property
    def alive(self) -> bool:
        """Whether the server process is, its first thread included; says nothing of the models."""
        at = self._server
        return at is not None and at.poll() is None and processes.Process(at.pid).alive

    @property
    def server_pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    @property
    def server_version(self) -> str:
        return self._files.version

    @property
    def all_models(self) -> tuple[str, ...]:
        """Ensembles included, which `models` leaves out."""
        return (*self.models, *self._ensembles)

    @property
    def canary_model(self) -> str:
        return self.config.canary if self.config.canary in self.models else self.models[0]

    def stubs(self, model: str) -> list[processes.Process]:
        """The live stub processes of a model, stopped ones included."""
        path = f"{self.run_dir / 'repository' / model}{os.sep}"
        return [
            process
            for process in processes.run_processes(self.run_id)
            if any(argument.startswith(path) for argument in process.command[1:2])
        ]

    def log_tail(self, lines: int = 20) -> str:
        return self._server_log.tail(lines)

    # -- steps -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        config = self.config
        for name in ("repository", "backends", "instances"):
            if (self.run_dir / name).exists():
                shutil.rmtree(self.run_dir / name)
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._access.save_admin_key(self.run_dir)
        self.shm_dir.mkdir(mode=0o700)
        removable = self.run_dir if config.run_dir is None else None
        self._guard = start_guard(self.run_id, removable)
        self._files = find_server()
        lay_out_backends(self._files, self.run_dir / "backends")
        if config.cold == "embedded":
            self.store = embedded_store(config, self.run_dir, self.run_id)
            self.store.start()
        self.instances = lay_out_models(
            config.model_repository.resolve(),
            self.run_dir / "repository",
            {**run_parameters(config, self.run_dir, self.shm_dir, self.store), **config.parameters},
            config.instances,
        )
        unknown = set(config.models) - set(self.instances)
        if unknown:
            raise ConfigError(
                f"no such model: {sorted(unknown)}; there are {sorted(self.instances)}"
            )
        # Members first, so that an ensemble finds what it is made of.
        wanted = config.models or tuple(sorted(self.instances))
        self._ensembles = tuple(name for name in wanted if self.instances[name] == 0)
        self.models = tuple(name for name in wanted if self.instances[name] > 0)
        if not self.models:
            raise ConfigError(f"only ensembles are to be loaded ({wanted}); name their models too")

    def _start_server(self) -> None:
        config = self.config
        wanted = self._ports or (config.http_port, config.grpc_port, config.metrics_port)
        self._ports = free_ports(tuple(config.servers), wanted)
        clear_stop(self.run_dir)
        threads = threads_per_instance(
            max((self.instances[name] for name in self.models), default=1)
        )
        environment = self._access.without_secrets(server_environment(self._files, threads))
        environment[processes.RUN_ID_VARIABLE] = self.run_id
        environment[RUN_DIR_VARIABLE] = str(self.run_dir)
        self._server_log.mark()
        with open(self.log_file, "ab") as log:

            def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A process group of its own: Ctrl-C in the terminal reaches only the launcher.
                    start_new_session=True,
                    **how,
                )

            secret = self._access.secret_options
            try:
                self._server = start_concealed(self._command(), secret, environment, start)
            except ConcealmentRefused as error:
                if self._access.access_key is not None:
                    raise StartFailed(
                        "the access key cannot be kept out of the process list, since this machine "
                        f"does not allow ptrace ({error}); use mutual TLS (--tls-client-ca) instead"
                    ) from None
                self._log(f"local users can read the run's admin key: no ptrace here ({error})")
                self._server = start([*self._command(), *secret], env=environment)

    def _command(self) -> list[str]:
        assert self._ports is not None
        command = server_command(
            self.config,
            self._files.binary,
            self.run_dir / "backends" if self._files.stub else self._files.backends,
            self.run_dir / "repository",
            self.all_models,
            self._ports,
            self._region_prefix,
        )
        return [*command, *self._access.options]

    def _stop_server(self) -> None:
        server = self._server
        if server is None:
            return
        if server.poll() is None:
            if not request_stop(self.run_dir, self.config.flush_timeout_s):
                self._log("an instance did not finish its writing in time")
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=2.5)
        self._kill_server()
        processes.hurry(server.pid)
        try:
            server.wait(timeout=2)
        except subprocess.TimeoutExpired:
            # Killed, but a thread of it has not been given the moment it takes to die.
            self._log(f"process {server.pid} is still dying")
        self._server = None

    def _kill_server(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)

    def _server_processes(self) -> list[processes.Process]:
        """All of the run but the gateway: after the server's end, what it left."""
        gateway = self.store.pid if self.store is not None else None
        return [p for p in processes.run_processes(self.run_id) if p.pid != gateway]

    def _remove_regions(self) -> None:
        for path in self.config.shm.glob(f"{self._region_prefix}*"):
            path.unlink(missing_ok=True)

    def _failure(self, what: str) -> StartFailed:
        what = self._server_log.with_reason(what)
        return StartFailed(f"{what}; the end of {self.log_file}:\n{self.log_tail()}")

    def _write_description(self) -> None:
        """For tools of other processes: where this run is."""
        description = {
            "run_id": self.run_id,
            "launcher_pid": os.getpid(),
            "server_pid": self.server_pid,
            "models": self.all_models,
            "shm_dir": str(self.shm_dir),
            "warm_dir": str(self.config.warm_dir or self.run_dir / "warm"),
            **{key: value for key, value in vars(self.endpoints).items() if value},
        }
        (self.run_dir / "run.json").write_text(json.dumps(description, indent=1) + "\n")
