"""The demo: `bench guided` with a small model and one schema, so that one command shows what the plugin does."""

from __future__ import annotations

from argparse import Namespace

from . import guided, report

# What `bench guided` would ask for and the demo decides. Guided outputs end early: twice as many requests keep the batch
# full for most of a run.
DECIDED = {
    "model": None,
    "engine_args": "{}",
    "prompt": guided.PROMPT,
    "schemas": ["bounded"],
    "requests": 2,
    "minutes": 0,
}


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups demo`."""
    parser.add_argument(
        "--backends",
        type=report.numbers(str),
        default=list(guided.BACKENDS),
        help="comma-separated (" + ",".join(guided.BACKENDS) + ")",
    )
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request, at most (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often all but the cold run are repeated, medians shown (default: 1)"
    )
    parser.add_argument("--disable-any-whitespace", action="store_true", help="vLLM's option of that name")
    report.add_arguments(parser)


def run(options) -> int:
    """Run the demo. 0: all ids equal; 1: an id differed, or an engine failed; 2: something is missing."""
    return guided.run_as("demo", Namespace(**DECIDED, **vars(options), batches=[options.batch]))
