"""python -m paxpage.bench kernels from a checkout.

python scripts/bench_kernels.py [--backends triton,mosaic] [--only decode] [--json FILE]
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from paxpage.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main([sys.argv[0], "kernels", *sys.argv[1:]]))
