"""Patching by contract: a patch applies only to code that it was proven against. Knows nothing of masks or prefixes."""

from .contract import UNPARSED, VLLM, Contract, ContractError, Declined, Difference, Form, load
from .engine import APPLIED, DECLINED, DISABLED, NOT_MEANT, REVERTED, WAITING, Context, Patch, apply
from .fingerprint import find, find_in_source, fingerprint
from .sources import Source, Tree, Wheel
from .targets import installed_version, seen_fingerprint
from .verification import Verification

__all__ = [
    "APPLIED",
    "DECLINED",
    "DISABLED",
    "NOT_MEANT",
    "REVERTED",
    "UNPARSED",
    "VLLM",
    "WAITING",
    "Context",
    "Contract",
    "ContractError",
    "Declined",
    "Difference",
    "Form",
    "Patch",
    "Source",
    "Tree",
    "Verification",
    "Wheel",
    "apply",
    "find",
    "find_in_source",
    "fingerprint",
    "installed_version",
    "load",
    "seen_fingerprint",
]
