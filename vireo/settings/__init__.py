"""Typed, strict settings: `load_settings(argv)` reads flags and a file into one `Settings`.

Nothing here imports torch or transformers, so a mistyped flag is answered at once.
"""

from vireo.settings.load import load_settings
from vireo.settings.schema import Settings
from vireo.settings.table import describe

__all__ = ["Settings", "describe", "load_settings"]
