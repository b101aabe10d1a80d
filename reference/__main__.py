"""`python -m reference`: the `twinfer` program with the tier set to `reference`."""

from reference.frontend.cli import main

raise SystemExit(main(tier="reference"))
