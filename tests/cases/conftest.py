"""What the cases share."""

from tests.helpers.fixtures import shelf, unchecked_types

__all__ = ["shelf", "unchecked_types"]
