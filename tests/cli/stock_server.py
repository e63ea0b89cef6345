"""What the engine `stock` starts: it says what it was given, and has a help."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("--model", "--port", "--connector", "--api-key", "--nested"):
    parser.add_argument(flag)
options = parser.parse_args()
print(
    json.dumps(
        {
            **vars(options),
            "flags": Path("parts/flags.yaml").read_text(),
            "directory": str(Path.cwd()),
            "mode": os.environ["STOCK_MODE"],
            "pool": os.environ["OF_THE_POOL"],
            "path": os.environ["PATH"],
        }
    )
)
