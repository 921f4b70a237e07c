"""What each rule of `Trace.tla` says, for the person whose recording broke it: `rules.toml`."""

import tomllib
from pathlib import Path

RULES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
