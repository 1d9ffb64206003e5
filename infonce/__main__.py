"""`python -m infonce` is the command `infonce`."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="infonce")
