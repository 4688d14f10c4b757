"""The benchmark scripts and their package `bench` lie in tools/, which is no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
