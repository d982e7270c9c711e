"""`python -m perdure`: the `perdure` command."""

from perdure.cli import main

if __name__ == "__main__":
    main(prog_name="perdure")
