"""What routing policies cost.

``python -m tests.bench.policies --micro [--json]``: one decision and one release, see ``tests.bench.policies_micro``.
"""

from __future__ import annotations

import argparse

from tests.bench import policies_micro


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--micro", action="store_true", required=True, help="the cost of a decision and of a release")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    policies_micro.main(parser.parse_args().json)


if __name__ == "__main__":
    main()
