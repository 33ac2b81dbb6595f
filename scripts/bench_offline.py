"""python -m paxpage.bench offline from a checkout, models named without a flag.

python scripts/bench_offline.py llama8b llama1b [--tests 123456] [--out FILE]
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from paxpage.bench.__main__ import main as bench
from paxpage.bench.models import CONFIGS


def main() -> None:
    """Command line."""
    names = [argument for argument in sys.argv[1:] if argument in CONFIGS]
    rest = [argument for argument in sys.argv[1:] if argument not in CONFIGS]
    sys.exit(bench([sys.argv[0], "offline", *([f"--model={','.join(names)}"] if names else []), *rest]))


if __name__ == "__main__":
    main()
