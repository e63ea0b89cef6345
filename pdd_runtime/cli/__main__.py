"""`python -m pdd_runtime.cli` is `pdd-runtime`."""

from pdd_runtime.cli import main

main()
