"""`python -m stepguard`, the same as the `stepguard` command."""

from stepguard.cli.app import main

if __name__ == "__main__":
    main()
