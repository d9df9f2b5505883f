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

import wrapt

from . import conflicts
from .contract import VLLM, Contract, Declined, Form
from .rebinding import rebind
from .targets import forget_sources, imported, installed_version, require_stock, seen_fingerprint, split
from .verification import Verification

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
    `live()` says whether the patch is in force, for what outlives a revert of it.
    `verifies`, None unless the user asked for it, says of an answer whether to compare it with stock's. Where they
    differ, the glue calls `differed(facts, private)` and returns stock's; what a client sent belongs into `private`.
    `intact(kind)` says whether a class has all methods of the patch, none overridden or replaced by somebody.
    """

    form: str
    stock: Mapping[str, object]
    failed: Callable[[BaseException], None]
    prove: Callable[[], bool] = lambda: True
    live: Callable[[], bool] = lambda: True
    verifies: Callable[[], bool] | None = None
    differed: Callable[[Mapping, Mapping], None] = lambda facts, private: None
    intact: Callable[[type], bool] = lambda kind: True


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
    verification: Verification = field(default_factory=Verification)
    verified: int = 0
    differences: int = 0
    notes: list = field(default_factory=list)
    _owners: dict = field(default_factory=dict)
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
        """Compare the installed source and libraries with the contract, importing nothing. Raises Declined."""
        self.contract.require_libraries(installed_version)
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
            context = Context(
                self.form.name,
                self.stock,
                self.failed,
                self.prove,
                lambda: self.live,
                self.verifies if self.verification.share > 0 else None,
                self.differed,
                lambda kind: conflicts.intact(kind, self.gates),
            )
            self._later = getattr(glue, "PROVES_LATER", False)
            self.replacements = glue.build(context)
            if set(self.replacements) != set(targets):
                raise Declined(f"{self.glue} replaces {sorted(self.replacements)}, its contract says {sorted(targets)}")
            self._probe = functools.partial(glue.probe, context, self.replacements)
            for path, stock in targets.items():
                self.gates[path] = self._gate(stock, self.replacements[path])
                self._owners[path] = rebind(path, stock, self.gates[path])
            self.status, self.live = APPLIED, True
            _installed.append(self)
            self._note(conflicts.overriding(targets), logging.INFO)
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
                self._require_premises()
                self._probe()
            except Exception as error:
                self._step_aside(str(error) if isinstance(error, Declined) else f"its probe failed: {error!r}")
            finally:
                self._proven, self._proving = True, False
            live = self.live
        for patch in list(_installed):
            patch.look_around()
        return live

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

    def verifies(self) -> bool:
        """Whether this answer shall be compared with stock's."""
        # The probe compares by itself, and must see what the patch answers.
        if self._proving or not self.verification.due():
            return False
        self.verified += 1
        return True

    def differed(self, facts: Mapping, private: Mapping) -> None:
        """Called by a replacement whose answer was not stock's, before it returns stock's: the patch is reverted."""
        with self._lock:
            self.differences += 1
            if not self.live:
                return
            self.revert()
            self.reason = "an answer of it differed from stock's"
            facts = {"form": self.form.name if self.form else None, **facts}
            logger.error(
                "vllm-speedups: %s was reverted, vLLM runs stock there: %s, and stock's was used. To reproduce: %s",
                self.name,
                self.reason,
                self.verification.report(self.name, facts, private),
            )

    def revert(self) -> None:
        """Put stock back wherever the gates are bound. Whoever kept a gate gets stock through it from now on."""
        with self._lock:
            self.live = False
            for path, gate in self.gates.items():
                other = conflicts.displaced(path, gate)
                rebind(path, gate, self.stock[path], self._owners[path])
                if other:
                    self._note([f"{other}, and is left alone"], logging.WARNING)
            self.gates = {}
            self.status = REVERTED
            if self in _installed:
                _installed.remove(self)

    def look_around(self) -> None:
        """Name, once each, what somebody has put in place of our replacements since. Costs some microseconds.

        Takes no lock and never raises: another thread may be using the patch.
        """
        try:
            self._note(conflicts.overriding(self.gates), logging.INFO)
            found = [conflicts.displaced(path, gate) for path, gate in list(self.gates.items())]
            self._note(filter(None, found), logging.WARNING)
        except Exception:
            logger.exception("vllm-speedups: %s: could not look for other plugins", self.name)

    def look_again(self) -> None:
        """The same, and leave the field where somebody has replaced a premise since."""
        self.look_around()
        with self._lock:
            try:
                if self.live:
                    self._require_premises()
            except Declined as no:
                self._step_aside(str(no))

    def _step_aside(self, reason: str) -> None:
        self.revert()
        self.status, self.reason = DECLINED, reason
        logger.warning("vllm-speedups: %s is off, vLLM runs stock there: %s", self.name, reason)

    def overruled(self) -> bool:
        """Whether somebody bound something to a target after us that does not lead to our replacement."""
        return any(not conflicts.leads_to(conflicts.bound(path), gate) for path, gate in self.gates.items())

    def _require_premises(self) -> None:
        for path in self.form.premises:
            if path in self.stock:
                other = conflicts.premise_displaced(path, self.stock[path])
                if other:
                    raise Declined(other)
            elif imported(split(path)[0]):
                require_stock(path)

    def _note(self, lines: Iterable, level: int) -> None:
        for line in lines:
            if line not in self.notes:
                self.notes.append(line)
                logger.log(level, "vllm-speedups: %s: %s", self.name, line)

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


# The patches that are in place in this process.
_installed: list = []


def apply(
    patches: Iterable[Patch],
    version: str | None,
    disables: Callable[[Contract], str],
    eager: bool = False,
    verification: Verification | None = None,
) -> None:
    """Bring every patch into the state that this vLLM, of that version, and the user's settings call for. Never raises.

    `eager` imports the targets' modules and runs the probes at once, for those who want to know now.
    """
    for patch in patches:
        patch.verification = verification or patch.verification
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
