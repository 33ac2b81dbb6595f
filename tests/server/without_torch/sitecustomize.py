"""Imported by Python as it starts, where its folder is on PYTHONPATH: torch cannot be imported.

Nobody's server wants it, but transformers imports it where it is installed, as it is beside these tests: 4 s a start.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
