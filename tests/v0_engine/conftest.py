"""The tests in this folder run vLLM 0.8.5's V0 engine (make test-v0-engine); elsewhere none is collected."""

from __future__ import annotations

from vllm_speedups.doctor import find_vllm

collect_ignore_glob = [] if ((find_vllm() or {}).get("version") or "").startswith("0.8.5") else ["*"]
