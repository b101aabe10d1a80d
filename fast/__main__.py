"""`python -m fast`: the `twinfer` program with the tier set to `fast`."""

from reference.frontend.cli import main

raise SystemExit(main(tier="fast"))
