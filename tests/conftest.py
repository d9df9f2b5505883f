"""What the whole suite shares: hearing what the plugin says, and settings that do not outlive a test."""

from __future__ import annotations

import logging

import pytest

from vllm_speedups import settings


class Said(logging.Handler):
    """Collects what is logged under `vllm.speedups`, wherever vLLM's own logging set-up sends it."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: list = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def texts(self, level: int = logging.DEBUG) -> list:
        """The messages at `level` or above."""
        return [record.getMessage() for record in self.records if record.levelno >= level]


@pytest.fixture
def said():
    """What the plugin logs while the test runs."""
    logger, handler = logging.getLogger("vllm.speedups"), Said()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def environ(monkeypatch):
    """The process environment without our variables; settings are read from it anew, and forgotten afterwards."""
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(settings, "_current", None)
    return monkeypatch
