"""Patching by contract: a patch applies only to code that it was proven against. Knows nothing of masks or prefixes."""

from .contract import Contract, ContractError, Declined, Form, load
from .engine import APPLIED, DECLINED, DISABLED, NOT_MEANT, REVERTED, WAITING, Context, Patch, apply
from .fingerprint import find, find_in_source, fingerprint
from .targets import seen_fingerprint

__all__ = [
    "APPLIED",
    "DECLINED",
    "DISABLED",
    "NOT_MEANT",
    "REVERTED",
    "WAITING",
    "Context",
    "Contract",
    "ContractError",
    "Declined",
    "Form",
    "Patch",
    "apply",
    "find",
    "find_in_source",
    "fingerprint",
    "load",
    "seen_fingerprint",
]
