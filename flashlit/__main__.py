"""`python -m flashlit` is the command line."""
from flashlit.cli import main

raise SystemExit(main())
