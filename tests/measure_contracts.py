"""What contracts cost: registering with everything applied, and auditing a release, each in fresh processes.

    python tests/measure_contracts.py [--repeat 5] [WHEEL ...]

Registering is timed in a process that has imported what a vLLM engine process has by then; the import of the plugin's own
modules counts, from bytecode, which pip writes when it installs. Auditing is timed from the command line's start to its
end, with the most memory that it held.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

REGISTER = """
import json, time
import torch, vllm.plugins, vllm.v1.core.kv_cache_utils, vllm.v1.structured_output.utils
from vllm.v1.structured_output import backend_guidance, backend_outlines, backend_xgrammar
start = time.perf_counter()
from vllm_speedups import plugin
imported = time.perf_counter()
plugin.register()
done = time.perf_counter()
applied = [patch.name for patch in plugin.patches() if patch.status == "applied"]
print(json.dumps([1e3 * (done - start), 1e3 * (done - imported), applied]))
"""


def main() -> None:
    """Print both, medians and extremes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", metavar="WHEEL", help="wheels of vLLM to audit")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="processes for each figure (default: 5)")
    options = parser.parse_args()
    # Before the others: the most memory of all child processes is all that can be had.
    for wheel in options.wheels:
        seconds = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "vllm_speedups.cli", "audit", wheel], stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"audit {wheel}: {shown(seconds)} s")
        print(f"  at most {peak:.0f} MiB")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(options.repeat + 1):
            arguments = {"env": environment, "capture_output": True, "text": True, "check": True}
            out = subprocess.run([sys.executable, "-c", REGISTER], **arguments).stdout
            runs.append(json.loads(out.splitlines()[-1]))
    # The first run writes the bytecode.
    del runs[0]
    print(f"register(), {len(runs[0][2])} patches applied ({', '.join(runs[0][2])}):")
    print(f"  {shown([run[0] for run in runs])} ms, of which {shown([run[1] for run in runs])} after the plugin's imports")


def shown(values: list) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
