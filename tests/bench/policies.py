"""What routing policies cost, and what they gain.

``python -m tests.bench.policies --micro [--json]``: one decision and one release, see ``tests.bench.policies_micro``.

``python -m tests.bench.policies [--quick] [--ablation | --oracle] [--json]``: every policy over traffic, loads and
tiers in the simulator, see ``tests.bench.policies_evaluation``.

``python -m tests.bench.policies --sockets [--json]``: the decisive cells with processes, see
``tests.bench.policies_sockets``.
"""

from __future__ import annotations

import argparse

from tests.bench import policies_evaluation, policies_micro, policies_sockets


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--micro", action="store_true", help="the cost of a decision and of a release")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    policies_evaluation.add_options(parser)
    policies_sockets.add_options(parser)
    options = parser.parse_args()
    if options.micro:
        policies_micro.main(options.json)
    elif options.sockets:
        policies_sockets.main(options)
    else:
        policies_evaluation.main(options)


if __name__ == "__main__":
    main()
