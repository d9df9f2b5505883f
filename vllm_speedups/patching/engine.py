"""The patch engine: decides which patches fit the installed code, puts them in place, proves them, takes them back."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Callable

import importlib_metadata
import wrapt

from .contract import VLLM, Contract, Declined, Form
from .rebinding import rebind
from .targets import forget_sources, imported, require_stock, resolve, seen_fingerprint, split

logger = logging.getLogger("vllm.speedups")

# How often a patch's own code may fail in one process before stock takes over for good.
MAX_FAILURES = 3

APPLIED = "applied"
WAITING = "waiting"
DECLINED = "declined"
DISABLED = "disabled"
REVERTED = "reverted"
NOT_MEANT = "not meant"


@dataclass
class Context:
    """What the glue of a patch gets: the form that matched, the originals, and where to report its own failures.

    `prove()` runs the patch's probe, once, and says whether the patch is live; for glue with `PROVES_LATER`.
    """

    form: str
    stock: Mapping[str, object]
    failed: Callable[[BaseException], None]
    prove: Callable[[], bool] = lambda: True


@dataclass
class Patch:
    """One patch in one process, from its contract to its state.

    `glue` names the module with `build(context) -> {target path: replacement}` and
    `probe(context, replacements) -> None`, which raises Declined where a replacement differs from stock. Where it sets
    `PROVES_LATER`, its replacements leave everything to stock until the glue has asked `context.prove()` and was told yes.
    """

    contract: Contract
    glue: str
    status: str = WAITING
    reason: str = ""
    form: Form | None = None
    live: bool = False
    stock: dict = field(default_factory=dict)
    replacements: dict = field(default_factory=dict)
    gates: dict = field(default_factory=dict)
    failures: int = 0
    _awaited: set = field(default_factory=set)
    _later: bool = False
    _proving: bool = False
    _proven: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        return self.contract.name

    @property
    def active(self) -> bool:
        """Whether the patch replaces its targets, or will as soon as their modules are imported."""
        return self.status in (APPLIED, WAITING)

    def check(self) -> None:
        """Compare the installed source with the contract, importing nothing. Raises Declined."""
        self.form = self.contract.match({path: seen_fingerprint(path) for path in self.contract.paths()})

    def arm(self) -> None:
        """Install now if all target modules are imported, else as soon as they are. Raises Declined."""
        missing = sorted(self._target_modules() - set(sys.modules))
        self._awaited = set(missing)
        for module in missing:
            wrapt.register_post_import_hook(self._imported, module)
        if not missing:
            self.install()

    def install(self, prove: bool = False) -> None:
        """Build the replacements and put them in place. Raises Declined, with nothing changed."""
        with self._lock:
            if self.status != WAITING or self.form is None:
                return
            targets = {path: require_stock(path) for path in self.form.targets}
            ready = self._target_modules()
            premises = {
                path: require_stock(path)
                for path in self.form.premises
                if split(path)[0] in ready or imported(split(path)[0])
            }
            self.stock = {**premises, **targets}
            glue = importlib.import_module(self.glue)
            context = Context(self.form.name, self.stock, self.failed, self.prove)
            self._later = getattr(glue, "PROVES_LATER", False)
            self.replacements = glue.build(context)
            if set(self.replacements) != set(targets):
                raise Declined(f"{self.glue} replaces {sorted(self.replacements)}, its contract says {sorted(targets)}")
            self._probe = functools.partial(glue.probe, context, self.replacements)
            for path, stock in targets.items():
                self.gates[path] = self._gate(stock, self.replacements[path])
                rebind(path, stock, self.gates[path])
            self.status, self.live = APPLIED, True
            if prove or any(not isinstance(stock, FunctionType) for stock in targets.values()):
                self.prove()

    def prove(self) -> bool:
        """Run the probe, once; on a difference revert and say so. Whether the patch is live afterwards."""
        with self._lock:
            # The lock makes other threads wait; only what the probe itself calls comes by while it runs.
            if self._proven or self._proving or not self.live:
                return self.live
            self._proving = True
            try:
                self._probe()
            except Exception as error:
                reason = str(error) if isinstance(error, Declined) else f"its probe failed: {error!r}"
                self.revert()
                self.status, self.reason = DECLINED, reason
                logger.warning("vllm-speedups: %s is off, vLLM runs stock there: %s", self.name, reason)
            finally:
                self._proven, self._proving = True, False
            return self.live

    def failed(self, error: BaseException) -> None:
        """Called by a replacement whose own code raised, before it returns stock's answer."""
        with self._lock:
            self.failures += 1
            if self.failures == 1:
                logger.error("vllm-speedups: %s failed once, stock's answer was used", self.name, exc_info=error)
            if self.failures >= MAX_FAILURES and self.live:
                self.revert()
                self.reason = f"failed {self.failures} times, at last with {error!r}"
                logger.error("vllm-speedups: %s was reverted, vLLM runs stock there: it %s", self.name, self.reason)

    def revert(self) -> None:
        """Put stock back wherever the gates are bound. Whoever kept a gate gets stock through it from now on."""
        with self._lock:
            self.live = False
            for path, gate in self.gates.items():
                if _bound(path) is gate:
                    rebind(path, gate, self.stock[path])
                else:
                    logger.warning("vllm-speedups: %s was replaced after us and is left alone", path)
            self.gates = {}
            self.status = REVERTED

    def _target_modules(self) -> set:
        return {split(path)[0] for path in self.form.targets} if self.form else set()

    def _imported(self, module: object) -> None:
        """Post-import hook. Never raises: the import belongs to vLLM."""
        # Not `sys.modules`: a module that is only half executed is in there too.
        self._awaited.discard(getattr(module, "__name__", None))
        if self.status != WAITING or self._awaited:
            return
        try:
            self.install()
        except Exception as error:
            self.decline(error)
            logger.warning("vllm-speedups: %s is off, vLLM runs stock there: %s", self.name, self.reason)
        finally:
            forget_sources()

    def decline(self, error: BaseException) -> None:
        """Record why the patch stays off."""
        self.status, self.live = DECLINED, False
        self.reason = str(error) if isinstance(error, Declined) else f"unexpected {error!r}"

    def _gate(self, stock: object, replacement: object) -> object:
        """What is bound in place of a function: proves the patch on first use, and is stock again after a revert."""
        if not isinstance(stock, FunctionType):
            return replacement

        @functools.wraps(stock)
        def gate(*args, **kwargs):
            if self._proven or self._later:
                return replacement(*args, **kwargs) if self.live else stock(*args, **kwargs)
            return replacement(*args, **kwargs) if self.prove() else stock(*args, **kwargs)

        # vLLM's V0 engine asks a logits processor for its signature at every token: made anew it takes three times as long.
        gate.__signature__ = inspect.signature(stock)
        gate.__vllm_speedups__ = self.name
        return gate


def _bound(path: str) -> object:
    try:
        return resolve(path)
    except (Declined, KeyError):
        return None


def installed_version(package: str) -> str | None:
    """The version of another package than vLLM, None where it is not installed."""
    try:
        return importlib_metadata.version(package)
    except importlib_metadata.PackageNotFoundError:
        return None


def apply(
    patches: Iterable[Patch], version: str | None, disables: Callable[[Contract], str], eager: bool = False
) -> None:
    """Bring every patch into the state that this vLLM, of that version, and the user's settings call for. Never raises.

    `eager` imports the targets' modules and runs the probes at once, for those who want to know now.
    """
    for patch in patches:
        if patch.status != WAITING or patch.form is not None:
            continue
        contract = patch.contract
        installed = version if contract.package == VLLM else installed_version(contract.package)
        if not contract.meant_for(installed) or (installed is None and contract.package != VLLM):
            absent = "" if installed or contract.package == VLLM else ", which is not installed"
            patch.status, patch.reason = NOT_MEANT, f"meant for {contract.meant}{absent}"
            continue
        off = disables(patch.contract)
        if off:
            patch.status, patch.reason = DISABLED, off
            continue
        try:
            patch.check()
            if eager:
                for module in sorted(patch._target_modules()):
                    importlib.import_module(module)
                patch.install(prove=True)
            else:
                patch.arm()
        except Exception as error:
            patch.decline(error)
    forget_sources()
